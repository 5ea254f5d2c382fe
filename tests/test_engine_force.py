"""Teacher forcing through the Engine door: batches, masks, whole distributions, and a forced beginning of a trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvkeep import Settings
from kvkeep.engine import Engine, Forcing, Sampling
from kvkeep.hf import force as force_module
from kvkeep.hf.cache import EvictCache
from kvkeep.hf.engine import HFEngine
from models import VOCAB, prompt, step, tiny
from test_load import make_tokenizer

ARMS = {
    "full": Settings("full"),
    "random": Settings("random", budget=24, buffer=4, seed=7),
    "recency": Settings("recency", budget=24, buffer=4),
    "bare": Settings("random", budget=24, buffer=4, protect="none"),
}
LENGTHS = [(8, 60), (13, 40), (8, 60), (8, 41), (13, 40)]


def engine(settings: Settings = ARMS["random"], family: str = "llama") -> HFEngine:
    return HFEngine(tiny(family), make_tokenizer(), settings)


def ids(n: int, seed: int = 0) -> list[int]:
    return [int(i) for i in prompt(n, seed).flatten()]


def some_masks() -> dict[str, Tensor]:
    """The token at 11 stays in one head of each layer, and those at 10 to 12 go from all others."""
    keep, forget = (torch.zeros(len(LENGTHS), 3, 2, 20, dtype=torch.bool) for _ in range(2))
    forget[..., 10:13] = True
    for row in range(len(LENGTHS)):
        keep[row, :, row % 2, 11] = True
    return {"keep": keep, "forget": forget}


def by_token(settings: Settings, start: list[int], trace: list[int], masks: dict[str, Tensor]) -> Tensor:
    """Log-probabilities [T, V], fed token by token."""
    cache, model = EvictCache(tiny("llama"), settings, [0]), tiny("llama")
    cache.override(**masks)
    found, feed = [], torch.tensor([start])
    for token in trace:
        found.append(step(model, cache, feed)[0, -1].log_softmax(-1))
        feed = torch.tensor([[token]])
    cache.close()
    return torch.stack(found)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("masked", [False, True])
def test_a_batch_equals_each_alone_equals_token_by_token(arm: str, masked: bool) -> None:
    masks = some_masks() if masked else {}
    prompts = [ids(p, seed=i) for i, (p, _) in enumerate(LENGTHS)]
    traces = [ids(t, seed=10 + i) for i, (_, t) in enumerate(LENGTHS)]
    together = engine(ARMS[arm]).force(prompts, traces, **masks)
    for i, found in enumerate(together):
        mine = {name: mask[i : i + 1] for name, mask in masks.items()}
        alone = engine(ARMS[arm]).force([prompts[i]], [traces[i]], **mine)[0]
        slow = by_token(ARMS[arm], prompts[i], traces[i], mine)
        said = torch.tensor(traces[i])
        assert found.logprobs.shape == found.greedy.shape == found.rounds.shape == said.shape
        assert torch.allclose(found.logprobs, alone.logprobs, atol=1e-5)
        assert torch.allclose(found.logprobs, slow.gather(-1, said[:, None])[:, 0], atol=1e-5)
        assert torch.equal(found.greedy, slow.argmax(-1) == said)
        assert torch.equal(found.rounds, alone.rounds)
        assert {k: v for k, v in found.stats.items() if "bytes" not in k and k != "batch"} == {
            k: v for k, v in alone.stats.items() if "bytes" not in k and k != "batch"
        }
    if arm == "random" and masked:
        plain = engine(ARMS[arm]).force(prompts, traces)
        assert not torch.allclose(plain[0].logprobs, together[0].logprobs, atol=1e-3)


def test_rounds_say_when_they_ran() -> None:
    found = engine().force([ids(8)], [ids(30)])[0]
    # K + r = 28 entries: the forward that would bring the 29th runs a round; it feeds trace token 20, predicts 21.
    assert found.rounds.tolist() == [max(0, (t - 17) // 4) for t in range(30)]
    assert found.stats["rounds"] == 3


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("numbers", [1 << 25, 5 * 3 * VOCAB])
def test_distributions_come_without_gaps_and_match_force(
    arm: str, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(force_module, "_NUMBERS", numbers)  # the small one gives chunks of five tokens at most
    prompts, traces = [ids(8, i) for i in range(3)], [ids(60, 10 + i) for i in range(3)]
    made = engine(ARMS[arm])
    forcing: Forcing = made.logits(prompts, traces)
    with pytest.raises(RuntimeError, match="take all chunks"):
        forcing.stats()
    chunks, next_token = [], 0
    for chunk in forcing:
        assert chunk.start == next_token
        next_token += chunk.logprobs.shape[1]
        assert chunk.logprobs.dtype == torch.float32
        assert chunk.logprobs.numel() <= numbers
        assert not chunk.logprobs.requires_grad
        chunks.append(chunk.logprobs)
    assert next_token == 60
    assert torch.is_grad_enabled()
    whole = torch.cat(chunks, dim=1)
    assert torch.allclose(whole.exp().sum(-1), torch.ones(3, 60), atol=1e-5)
    monkeypatch.undo()
    for i, forced in enumerate(made.force(prompts, traces)):
        said = torch.tensor(traces[i])
        assert torch.allclose(whole[i].gather(-1, said[:, None])[:, 0], forced.logprobs, atol=1e-5)
        assert forcing.stats()[i]["rounds"] == forced.stats["rounds"]


def test_two_forcings_at_once_do_not_disturb_each_other() -> None:
    prompts, traces = [ids(8)], [ids(60)]
    full, arm = engine(ARMS["full"]), engine()
    alone = [torch.cat([c.logprobs for c in e.logits(prompts, traces)], dim=1) for e in (full, arm)]
    first, second = full.logits(prompts, traces), arm.logits(prompts, traces)
    found: list[list[Tensor]] = [[], []]
    for chunk in second:
        found[1].append(chunk.logprobs)
        found[0] += [c.logprobs for c in [next(first, None)] if c is not None]
    assert torch.equal(torch.cat(found[0], dim=1), alone[0])
    assert torch.equal(torch.cat(found[1], dim=1), alone[1])


def hooks(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_forcing_that_ends_early_leaves_no_hooks() -> None:
    before = hooks(tiny("llama"))
    forcing = engine().logits([ids(8)], [ids(60)])
    next(forcing)
    assert hooks(tiny("llama")) > before
    forcing.close()
    forcing.close()
    assert hooks(tiny("llama")) == before
    assert next(forcing, None) is None
    with pytest.raises(RuntimeError, match="take all chunks"):
        forcing.stats()
    list(engine().logits([ids(8)], [ids(60)]))
    assert hooks(tiny("llama")) == before
    with pytest.raises(ValueError, match="does not fit"):
        list(engine().logits([ids(30)], [ids(60)]))
    with pytest.raises(ValueError, match="keep and forget are bool"):
        engine().logits([ids(8)], [ids(60)], keep=torch.zeros(1, 1, 1, 5))
    assert hooks(tiny("llama")) == before


def test_kept_masks_keep_and_forgotten_ones_go() -> None:
    """Read from the cache itself, right before it is closed."""
    masks, kept = some_masks(), []
    close = EvictCache.close

    def look(cache: EvictCache) -> None:
        if cache.rows and not kept:
            kept.extend(cache.kept_positions(i) for i in range(len(cache.rows)))
        close(cache)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EvictCache, "close", look)
        engine().force([ids(8, i) for i in range(5)], [ids(60, i) for i in range(5)], **masks)
    for row, positions in enumerate(kept):
        held = (positions == 11).any(-1)  # [L, H]
        assert held[:, row % 2].all()
        assert not held[:, 1 - row % 2].any()
        assert not ((positions == 10) | (positions == 12)).any()
    assert len(kept) == 5


def test_the_door_describes_the_model() -> None:
    made = engine(family="gemma3")
    assert isinstance(made, Engine)
    assert made.kv_shape == (2, 2)  # two of its four layers have full attention
    assert made.context == 512
    assert made.with_settings(ARMS["full"]).settings == ARMS["full"]
    assert made.with_settings(ARMS["full"]).model is made.model


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda e: e.force([ids(8)], []), "1 prompts need as many continuations, got 0"),
        (lambda e: e.force([ids(8)], [ids(5)], samples=[1, 2]), "as many sample numbers, got 2"),
        (lambda e: e.force([[]], [ids(5)]), "a prompt of at least one token"),
        (lambda e: e.force([ids(5)], [[]]), "a continuation of at least one token"),
        (lambda e: e.force([ids(5)] * 3, [ids(5)] * 3, keep=torch.ones(2, 1, 1, 9) > 0), "each of the 3 requests"),
        (lambda e: e.force([ids(5)], [ids(508)]), "513 tokens are more than the 512"),
        (lambda e: e.logits([], []), "a prompt of at least one token"),
        (lambda e: e.logits([ids(5), ids(6)], [ids(5)] * 2), "prompts of equal length, got 5 to 6 tokens"),
        (lambda e: e.logits([ids(5)] * 2, [ids(5), ids(6)]), "continuations of equal length, got 5 to 6 tokens"),
        (lambda e: e.generate([ids(5)], [0], Sampling(5), [ids(5)] * 2), "as many forced beginnings, got 2"),
        (lambda e: e.generate([ids(5)], [0], Sampling(5), [[]]), "a trace of at least one token"),
        (lambda e: e.generate([ids(5), ids(6)], [0, 0], Sampling(5), [ids(5)] * 2), "prompts of equal length"),
        (lambda e: e.generate([ids(5)] * 2, [0, 1], Sampling(5), [ids(5), ids(6)]), "traces of equal length"),
    ],
)
def test_bad_requests(call: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call(engine())


# ---- generation after a forced beginning ---------------------------------------------------------


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("begun", [1, 2, 17, 20, 21, 35])
def test_a_forced_beginning_goes_on_as_if_it_had_been_generated(arm: str, begun: int) -> None:
    sampling = Sampling(max_new_tokens=50, ignore_end=True)
    prompts = [ids(8), ids(8, 1), ids(8)]
    whole = engine(ARMS[arm]).generate(prompts, [0, 0, 1], sampling)
    rest = engine(ARMS[arm]).generate(
        prompts, [0, 0, 1], Sampling(50 - begun, ignore_end=True), [s.tokens[:begun] for s in whole]
    )
    for one, other in zip(whole, rest, strict=True):
        assert one.tokens[begun:] == other.tokens
        same = ("seen", "rounds", "entries", "evicted", "mean_entries", "peak_entries", "prompt")
        assert {k: one.stats[k] for k in same} == {k: other.stats[k] for k in same}


def test_a_forced_beginning_is_trace_and_can_be_evicted() -> None:
    found = engine().generate([ids(8)], [0], Sampling(3, ignore_end=True), [ids(60)])[0]
    assert len(found.tokens) == 3
    assert found.stats["prompt"] == found.stats["protected"] == 8
    assert found.stats["seen"] == 8 + 60 + 2
    assert found.stats["rounds"] == 11
    other = engine().generate([ids(8)], [0], Sampling(3, ignore_end=True), [ids(60, 1)])[0]
    assert found.tokens != other.tokens
