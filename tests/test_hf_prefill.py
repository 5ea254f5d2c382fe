"""Compressing a context once, after its prefill: what stays, what the model sees afterwards, and what is refused."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor

import kvkeep
from formulas.infokv import infokv
from formulas.snapkv import snapkv
from formulas.tova import tova
from kvkeep import Settings
from masked import Frame, Rule, close, masked_logits, taped
from models import generate, left_pad, prompt, step, tiny
from observed import Seen, observe, seen_sets
from scored import Count, Head, keydiff, knorm
from test_hf_methods import of_past, of_row

W = 4  # newest entries of the context that stay
N, KEEP = 30, 0.4


def of_heads(formula: Any) -> Any:
    def scores(seen: Seen) -> Any:
        return [
            [formula(Head(e.keys, {}, e.cached, e.window, [], e.scaling)) for e in layer] for layer in seen.row
        ]  # fmt: skip

    return scores


def newest(seen: Seen) -> Any:
    return [[{p: p for p in e.candidates} for e in layer] for layer in seen.row]


#: name -> (settings, scores or None where the policy draws, queries that it sees)
POLICIES: dict[str, tuple[dict[str, Any], Any, int]] = {
    "snapkv": ({"policy": "snapkv"}, of_row(snapkv), W),
    "pyramidkv": ({"policy": "pyramidkv"}, of_row(snapkv), W),
    "expected": ({"policy": "expected"}, of_past, 64),
    "infokv": ({"policy": "infokv"}, of_row(infokv), W),
    "infokv-adaptive": ({"policy": "infokv", "adaptive": True, "alpha": 0.5}, of_row(infokv, alpha=0.5), W),
    "tova": ({"policy": "tova"}, of_row(tova), 1),
    "keydiff": ({"policy": "keydiff"}, of_heads(keydiff), W),
    "knorm": ({"policy": "knorm"}, of_heads(knorm), W),
    "random": ({"policy": "random"}, None, W),
    "streaming": ({"policy": "streaming"}, newest, W),
}
SPLIT = ("pyramidkv", "infokv-adaptive")


def run(model: Any, name: str, ids: Tensor, pieces: list[int], **values: Any) -> tuple[list[Frame], Any]:
    """Feed ids in pieces; those that reach column N at most are prompt, then the trace comes."""
    settings = {**POLICIES[name][0], "prefill_keep": KEEP, "window": W, "seed": 7, **values}
    with kvkeep.evict(model, **settings) as cache, taped(model, cache) as frames:
        at = 0
        for size in pieces:
            part = ids[:, at : at + size]
            if at < N:
                with cache.as_prompt():
                    step(model, cache, part)
            else:
                step(model, cache, part)
            at += size
    return frames, cache


def check_logits(family: str, frames: list[Frame], ids: Tensor) -> Tensor:
    """Every forward's logits are those of a plain forward in which each head sees what it kept."""
    visible = seen_sets(frames, 0)
    model = tiny(family, "eager")
    expected, end = masked_logits(model, ids[:, : visible.shape[-1]], visible), 0
    for frame in frames:
        end += frame.columns
        close(frame.logits[0], expected[end - frame.columns : end])
    return visible


@pytest.mark.parametrize("name", list(POLICIES))
def test_what_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of the context, chosen as the formula says, the newest among it; then the trace runs on it."""
    family = "llama" if name == "knorm" else "qwen3"
    model, ids = tiny(family), prompt(45, seed=3)
    frames, cache = run(model, name, ids, [N, *[1] * 12])
    kept = ceil(KEEP * N)
    visible = check_logits(family, frames, ids)
    count, scores = Count(), POLICIES[name][1]
    after = visible[:, :, N].sum(-1) - 1  # what each head holds of the context
    assert after.float().mean() == kept
    assert (after == after[:, :1]).all()
    assert (after != kept).any() == (name in SPLIT)
    assert visible[:, :, N, N - W : N].all()
    if scores is None:
        assert not torch.equal(visible[0, 0, N], visible[0, 1, N])
        return
    rule = Rule(99, 1, W, sinks=4 if name == "streaming" else 0)
    for seen in observe(monkeypatch, family, frames, ids, rule, N, POLICIES[name][2], visible=visible):
        found = scores(seen)
        for i, layer in enumerate(seen.row):
            for h, entries in enumerate(layer):
                count.compare(seen.gone[i][h], found[i][h], entries.candidates)
    assert count.rounds == 6
    assert count.near <= 1
    assert cache.stats()["compressed"] == [kept]


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "knorm"])
def test_chunks_keep_the_same(name: str) -> None:
    """Not knorm: equal tokens have equally long keys in the first layer, and rounding decides who goes."""
    model, ids = tiny("llama"), prompt(40, seed=3)
    kept = [run(model, name, ids, [*sizes, 1])[1].kept_positions() for sizes in ([N], [7, 16, 7], [29, 1], [1] * N)]
    assert all(torch.equal(kept[0], other) for other in kept[1:])


@pytest.mark.parametrize("name", list(POLICIES))
def test_the_context_without_the_question(name: str) -> None:
    """The question neither changes what stays of the context nor loses an entry; it sees only what stayed."""
    model, context, kept = tiny("qwen3"), prompt(N - 6, seed=3), []
    for seed in (1, 2):
        ids = torch.cat([context, prompt(6, seed=seed), prompt(12, seed=9)], dim=1)
        frames, cache = run(model, name, ids, [N - 6, 6, *[1] * 8], context_length=N - 6)
        visible = check_logits("qwen3", frames, ids)
        assert visible[:, :, N, N - 6 : N].all()
        assert visible[:, :, N - 6, : N - 6].sum(-1).float().mean() == ceil(KEEP * (N - 6))
        kept.append(visible[:, :, N - 6, : N - 6])
        assert cache.stats()["compressed"] == [ceil(KEEP * (N - 6))]
    assert torch.equal(kept[0], kept[1])


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_padded_batch_equals_each_row_alone(name: str) -> None:
    model, lengths = tiny("llama"), [N, 22, 24]
    trace = prompt(12, seed=4)
    rows = [torch.cat([prompt(n, seed=n), trace], dim=1) for n in lengths]
    ids, mask = left_pad(rows).values()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    values = {**POLICIES[name][0], "prefill_keep": KEEP, "window": W, "seed": 7, "samples": [0, 1, 2]}
    with kvkeep.evict(model, **values) as cache, taped(model, cache) as frames:
        for first, end in [(0, N), *((t, t + 1) for t in range(N, N + 12))]:
            step(model, cache, ids[:, first:end], attention_mask=mask[:, :end], position_ids=positions[:, first:end])
    for i, n in enumerate(lengths):
        with kvkeep.evict(model, **{**values, "samples": [i]}) as cache, taped(model, cache) as single:
            step(model, cache, rows[i][:, :n])
            for t in range(n, n + 12):
                step(model, cache, rows[i][:, t : t + 1])
        width = single[-1].kept[0].shape[-1]
        assert torch.equal(frames[-1].kept[i][..., :width], single[-1].kept[0])
        close(torch.stack([f.logits[i, -1] for f in frames]), torch.stack([f.logits[0, -1] for f in single]))


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "infokv-adaptive", "random", "tova"])
def test_rounds_follow(name: str) -> None:
    """With a budget too: first the context shrinks, then rounds bound what there is."""
    model, ids = tiny("llama"), prompt(90, seed=3)
    frames, cache = run(model, name, ids, [N, *[1] * 55], budget=18, buffer=4)
    check_logits("llama", frames, ids)
    held = [(f.kept[0] >= 0).sum(-1).float().mean().item() for f in frames]
    assert held[0] == N
    assert held[1] == 13
    assert max(held[1:]) == 22
    stats = cache.stats()
    assert stats["rounds"] == [12]
    assert stats["compressed"] == [12]
    assert stats["entries"][0] == held[-1]


def test_a_context_larger_than_the_budget() -> None:
    """Cut to its share first, then to K at once."""
    model, ids = tiny("llama"), prompt(60, seed=3)
    frames, cache = run(model, "snapkv", ids, [N, *[1] * 10], budget=10, buffer=4, prefill_keep=0.9)
    check_logits("llama", frames, ids)
    assert frames[1].kept[0].shape[-1] == 11
    assert cache.stats()["compressed"] == [27]


def test_generate_after_prefill() -> None:
    """`cache.prefill` feeds the context; `generate` gets the whole prompt and feeds the rest."""
    model, ids = tiny("qwen3"), prompt(N, seed=3)
    settings = Settings("snapkv", prefill_keep=KEEP, window=W)
    cache = settings.cache(model)
    cache.prefill(ids[:, : N - 6])
    tokens = generate(model, cache, ids, 10).sequences
    assert cache.stats()["compressed"] == [10]
    assert cache.stats()["entries"] == [10 + 6 + 9]
    cache.reset()
    frames, _ = run(model, "snapkv", tokens, [N - 6, 6, *[1] * 9], context_length=N - 6)
    assert torch.equal(torch.stack([f.logits[0, -1] for f in frames[1:]]).argmax(-1), tokens[0, N:])
    cache.close()


def test_keeping_everything_changes_nothing() -> None:
    model, ids = tiny("llama"), prompt(40, seed=3)
    frames, cache = run(model, "snapkv", ids, [N, 1, 1], prefill_keep=1.0)
    plain, _ = run(model, "snapkv", ids, [N, 1, 1], prefill_keep=None, budget=99, buffer=4)
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(frames, plain, strict=True))
    assert cache.stats()["compressed"] == [N]


def test_memory_shrinks() -> None:
    """Storage is given back: what is allocated is what the layers hold."""
    model, ids = tiny("llama"), prompt(200, seed=3)
    with kvkeep.evict(model, "snapkv", prefill_keep=0.2, window=8) as cache:
        step(model, cache, ids)
        before = cache.nbytes()
        step(model, cache, ids[:, :1])
        assert cache.nbytes() < 0.9 * before
        assert cache.stats()["bytes"]["peak"] >= before


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"prefill_keep": 0.0}, "prefill_keep is the share"),
        ({"prefill_keep": 1.5}, "prefill_keep is the share"),
        ({"prefill_keep": True}, "prefill_keep is the share"),
        ({"prefill_keep": 0.4, "protect": "prompt"}, "use none or sinks:4"),
        ({"policy": "full", "prefill_keep": 0.4}, "evicts nothing"),
    ],
)
def test_bad_settings(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings(**{"policy": "snapkv", **values})


def test_refusals() -> None:
    model, ids = tiny("llama"), prompt(N, seed=3)
    with kvkeep.evict(model, "snapkv", prefill_keep=0.4, context_length=20) as cache:
        with pytest.raises(ValueError, match=r"crosses the end of the context at 20.*cache\.prefill"):
            step(model, cache, ids)
        step(model, cache, ids[:, :15])
        with pytest.raises(ValueError, match="context_length=20, but the prompt has 15 columns"):
            step(model, cache, ids[:, :1])
    with kvkeep.evict(model, "snapkv", prefill_keep=0.1, protect="sinks:8") as cache:
        step(model, cache, ids)
        with pytest.raises(ValueError, match=r"prefill_keep=0.1 of a context of 30 tokens is 3 entries, and 8"):
            step(model, cache, ids[:, :1])


# ---- what a review found -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["snapkv", "random", "pyramidkv"])
def test_pins_survive_the_compression(name: str) -> None:
    """Pinned positions of the context stay in every head and layer, and those still to come take no room."""
    model, ids = tiny("llama"), prompt(40, seed=3)
    frames, _ = run(model, name, ids, [N, 1, 1], protect="pin:3-7,60-80")
    visible = check_logits("llama", frames, ids)
    assert visible[:, :, N, 3:7].all()


def test_pins_survive_budgets_of_layers() -> None:
    model, ids = tiny("llama"), prompt(90, seed=3)
    values = {"budget": 40, "buffer": 8, "protect": "sinks:2+pin:10-30"}
    with kvkeep.evict(model, "pyramidkv", **values) as cache, taped(model, cache) as frames:
        step(model, cache, ids[:, :12])
        for t in range(12, 90):
            step(model, cache, ids[:, t : t + 1])
    assert seen_sets(frames, 0)[:, :, 89, [0, 1, *range(10, 30)]].all()


def test_what_does_not_go_with_it() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="use unit=1"):
        Settings("random", prefill_keep=0.4, options={"unit": 4})
    with pytest.raises(ValueError, match="groups=3 does not divide"), kvkeep.evict(model, prefill_keep=0.4, groups=3):
        pass
    keep = torch.ones(1, 1, 1, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="pin positions"), kvkeep.evict(model, prefill_keep=0.4, keep=keep):
        pass
    for length in (-5, 0):
        with pytest.raises(ValueError, match=f"context_length={length}"):
            kvkeep.evict(model, prefill_keep=0.4, context_length=length).__enter__()
    with pytest.raises(ValueError, match="context_length=9"):
        kvkeep.evict(model, budget=40, buffer=4, context_length=9).__enter__()
    with kvkeep.evict(model, "snapkv", prefill_keep=0.4) as cache:
        step(model, cache, prompt(100))
        with pytest.raises(ValueError, match="the newest 64 stay in any case: nothing is left to choose"):
            step(model, cache, prompt(1))


def test_windows_of_a_policys_own() -> None:
    """SnapKV keeps its 64 newest, KeyDiff none that do not score."""
    assert Settings("snapkv", prefill_keep=0.4).prefill_window == 64
    assert Settings("keydiff", prefill_keep=0.4).prefill_window == 0
    assert Settings("tova", prefill_keep=0.4).prefill_window == 1
    assert Settings("keydiff", prefill_keep=0.4, window=5).prefill_window == 5
    frames, _ = run(tiny("llama"), "keydiff", prompt(40, seed=3), [N, 1], window=None)
    assert not seen_sets(frames, 0)[:, :, N, N - W : N].all()


@pytest.mark.parametrize("name", ["expected", "beaconkv", "triattention"])
def test_the_questions_queries_reach_the_digest(name: str) -> None:
    """After a context of its own: what the digest holds is of context and question both."""
    model, ids, states = tiny("llama"), prompt(60, seed=3), []
    for context in (None, 24):
        values = {"prefill_keep": 1.0, "window": W, "budget": 200, "buffer": 4, "context_length": context}
        with kvkeep.evict(model, name, **values) as cache:
            for first, end in ((0, 24), (24, 36)):
                with cache.as_prompt():
                    step(model, cache, ids[:, first:end])
            for t in range(36, 60):
                step(model, cache, ids[:, t : t + 1])
            states.append(cache.watch.digests.get(0, [0]))
            assert cache.watch.digests.pending(0) == (
                24 % cache.policy.digest_blocks[1] if name != "triattention" else 0
            )
    if name == "beaconkv":  # other blocks, other beacons; but none is of the question alone
        assert states[0].shape == states[1].shape
    else:
        close(states[0], states[1], 1e-3)


def test_two_questions_draw_apart_and_contexts_alike() -> None:
    """Rounds draw from the whole prompt; what stays of a context depends neither on the question nor on the batch."""
    model, context, trace = tiny("llama"), prompt(20, seed=3), prompt(60, seed=9)
    rows = [torch.cat([context, prompt(6, seed=s), trace], dim=1) for s in (1, 2)]
    values = {"prefill_keep": 0.5, "context_length": 20, "budget": 20, "buffer": 4, "seed": 7}
    kept = []
    for batch in (rows[:1], rows[1:], rows):
        ids = torch.cat(batch)
        with kvkeep.evict(model, "random", **values) as cache, taped(model, cache) as frames:
            for first, end in ((0, 20), (20, 26)):
                with cache.as_prompt():
                    step(model, cache, ids[:, first:end])
            for t in range(26, 60):
                step(model, cache, ids[:, t : t + 1])
            kept.append([[f.kept[row] for f in frames] for row in range(len(batch))])
    assert torch.equal(kept[0][0][1], kept[1][0][1]), "the context's share"
    assert not torch.equal(kept[0][0][-1], kept[1][0][-1]), "rounds of the trace"
    for row in range(2):
        assert all(torch.equal(a, b) for a, b in zip(kept[row][0], kept[2][row], strict=True))


def test_reset_forgets_the_context() -> None:
    model, ids = tiny("qwen3"), prompt(40, seed=3)
    cache = Settings("snapkv", prefill_keep=KEEP, window=W).cache(model)
    cache.prefill(ids[:, :24], chunk=10)
    cache.reset()
    generate(model, cache, ids, 5)
    assert cache.stats()["compressed"] == [16]
    cache.reset()
    cache.prefill(ids[:, :39])  # one token is left of the prompt
    generate(model, cache, ids, 5)
    assert cache.stats()["prompt"] == [40]
    assert cache.stats()["compressed"] == [16]
    with pytest.raises(ValueError, match="reset"):
        cache.prefill(ids)
    cache.close()
