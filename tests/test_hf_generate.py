"""``generate`` with a bounded cache: sampling, batches, streamers, beams, spellings, embeddings."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

import kvkeep
from masked import Rule, check_row, close, force, masked_logits, replay, taped
from models import CACHE, generate, left_pad, prompt, tiny

K, R = 24, 4
RULE = Rule(K, R, R, share=1)


def evict(model: Any, **values: Any) -> Any:
    return kvkeep.evict(model, **{"budget": K, "buffer": R, "seed": 7, **values})


class Collect(BaseStreamer):
    """What a streamer is given."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.got += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
def test_sampling_several_sequences(family: str) -> None:
    """Rows of one prompt draw differently; row 0 keeps what the prompt alone keeps; every logit is right."""
    model = tiny(family, "eager")
    torch.manual_seed(0)
    with evict(model, track_positions=True) as cache, taped(model, cache) as frames:
        values = {"do_sample": True, "temperature": 1.5, "num_return_sequences": 3}
        found = generate(model, cache, prompt(11), 45, **values)
        kept = [cache.kept_positions(i) for i in range(3)]
    assert len({tuple(row.tolist()) for row in found.sequences}) == 3
    for i in range(3):
        assert check_row(model, frames, found.sequences[i : i + 1], RULE, 11, i) >= 6
        with evict(model, samples=[i]) as cache:
            generate(model, cache, prompt(11), 45)
            assert torch.equal(cache.kept_positions(), kept[i])
    assert not torch.equal(kept[0], kept[1])
    torch.manual_seed(0)
    with evict(model) as cache:
        assert torch.equal(generate(model, cache, prompt(11), 45, **values).sequences, found.sequences)


def test_several_sequences_of_padded_prompts() -> None:
    """num_return_sequences repeats each row of a padded batch: two prompts, samples 0 and 1 of each."""
    model, batch = tiny("llama"), left_pad([prompt(11), prompt(7)])
    torch.manual_seed(0)
    with evict(model, track_positions=True) as cache, taped(model, cache) as frames:
        values = {"attention_mask": batch["attention_mask"], "do_sample": True, "num_return_sequences": 2}
        found = generate(model, cache, batch["input_ids"], 40, **values)
    for i, n in enumerate((11, 11, 7, 7)):
        assert check_row(model, frames, found.sequences[i : i + 1, 11 - n :], RULE, n, i, 11) >= 4
        with evict(model, samples=[i % 2]) as cache:
            generate(model, cache, prompt(n), 40)
            assert torch.equal(cache.kept_positions(), frames[-1].kept[i])


def test_a_streamer_gets_every_token() -> None:
    model, streamer = tiny("llama"), Collect()
    with evict(model) as cache:
        found = generate(model, cache, prompt(11), 40, streamer=streamer)
    assert streamer.got == found.sequences[0].tolist()
    assert streamer.ended


def test_rows_that_end_early() -> None:
    """A row that met its end token is fed padding until the last row is done; the others must not notice."""
    model, batch = tiny("llama"), left_pad([prompt(11), prompt(7)])
    mask = batch["attention_mask"]
    with evict(model) as cache:
        free = generate(model, cache, batch["input_ids"], 40, attention_mask=mask).sequences
    end = next(t for t in free[0, 14:30].tolist() if t not in free[1].tolist())
    stop = free[0].tolist().index(end)
    with evict(model) as cache:
        found = generate(model, cache, batch["input_ids"], 40, attention_mask=mask, eos_token_id=end).sequences
    assert torch.equal(found[1], free[1])
    assert torch.equal(found[0, : stop + 1], free[0, : stop + 1])
    assert found[0, stop + 1 :].eq(0).all()


# ---- beams --------------------------------------------------------------------------------------


def slow_beams(model: Any, ids: Tensor, new: int, beams: int, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Beam search written out, without cache: each beam is one forward under the mask ``visible``."""
    alive = [(0.0, ids)]
    for _ in range(new):
        grown = []
        for score, tokens in alive:
            T = tokens.shape[1]
            scores = masked_logits(model, tokens, visible[:, :, :T, :T])[-1].log_softmax(-1) + score
            best = scores.topk(beams)
            extended = zip(best.values.tolist(), best.indices, strict=True)
            grown += [(value, torch.cat([tokens, token.view(1, 1)], dim=1)) for value, token in extended]
        alive = sorted(grown, key=lambda beam: -beam[0])[:beams]
    return torch.cat([tokens for _, tokens in alive]), torch.tensor([score for score, _ in alive])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("budget", [24, 80])
def test_beam_search_equals_a_slow_one(family: str, budget: int) -> None:
    """Beams share their prompt's stream, so that one history of kept sets holds for all of them."""
    model, ids = tiny(family), prompt(11)
    forced = torch.cat([ids, prompt(45)], dim=1)  # draws depend on the prompt, not on the trace
    with evict(model, budget=budget) as cache:
        visible, _ = replay(force(model, cache, forced, 11), Rule(budget, R, R, share=1), 11)
    values = {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.0, "output_scores": True}
    with evict(model, budget=budget) as cache:
        found = generate(model, cache, ids, 42, **values)
        assert cache.stats()["rounds"] == [0 if budget == 80 else 6] * 3
        assert torch.equal(cache.kept_positions(0), cache.kept_positions(2))
    sequences, scores = slow_beams(model, ids, 42, 3, visible)
    assert torch.equal(found.sequences, sequences)
    close(found.sequences_scores, scores, 1e-4)  # a sum of 42 log-probabilities
    if budget == 80:
        plain = generate(model, None, ids, 42, **values)
        assert torch.equal(found.sequences, plain.sequences)
        assert torch.equal(found.sequences_scores, plain.sequences_scores)


def test_beams_of_a_padded_batch() -> None:
    """Two prompts, three beams each: as each prompt alone."""
    model, rows = tiny("llama"), [prompt(11), prompt(7)]
    batch = left_pad(rows)
    with evict(model) as cache:
        both = generate(
            model, cache, batch["input_ids"], 40, attention_mask=batch["attention_mask"], num_beams=3
        ).sequences
    for i, ids in enumerate(rows):
        with evict(model) as cache:
            alone = generate(model, cache, ids, 40, num_beams=3).sequences
        assert torch.equal(both[i, 11:], alone[0, ids.shape[1] :])


# ---- ways to call it ----------------------------------------------------------------------------


@pytest.mark.parametrize("spelling", ["past_key_values", "cache"])
def test_both_spellings(spelling: str) -> None:
    """transformers 5.24 renamed ``past_key_values`` to ``cache`` and takes both; older ones know one."""
    if spelling == "cache" and CACHE != "cache":
        pytest.skip("this transformers does not know cache=")
    model, ids = tiny("llama"), prompt(11)
    with evict(model) as cache:
        expected = generate(model, cache, ids, 30).sequences
    with evict(model) as cache:
        found = model.generate(ids, max_new_tokens=30, do_sample=False, **{spelling: cache})
        assert cache.stats()["rounds"] == [3]
    assert torch.equal(found, expected)
    with evict(model) as cache, torch.no_grad():
        for first, end in [(0, 11), *((t, t + 1) for t in range(11, 40))]:
            logits = model(found[:, first:end], use_cache=True, **{spelling: cache}).logits
    assert logits[0, -1].argmax() == found[0, 40]


def test_settings_without_a_block() -> None:
    """Settings(...).cache(model), reset() between prompts, close() at the end."""
    model = tiny("llama")
    cache = kvkeep.Settings(policy="random", budget=K, buffer=R, seed=7).cache(model)
    for ids in (prompt(11), prompt(8), prompt(11)):
        cache.reset()
        found = generate(model, cache, ids, 40)
        with evict(model) as other:
            expected = generate(model, other, ids, 40)
        assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))
    cache.close()


def test_embeddings_need_sample_numbers() -> None:
    """Embeddings hide the ids that seed the draws; with a number a row they work like ids."""
    model, ids = tiny("llama"), prompt(11)
    embeds = model.get_input_embeddings()(ids).detach()
    values: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "inputs_embeds": embeds}
    with evict(model) as cache, pytest.raises(ValueError, match="samples="):
        model.generate(**values, **{CACHE: cache})
    kept = []
    for samples in ([3], [3], [4]):
        with evict(model, samples=samples) as cache, taped(model, cache) as frames:
            found = model.generate(**values, **{CACHE: cache})
            kept.append(cache.kept_positions())
        check_row(model, frames, torch.cat([ids, found], dim=1), RULE, 11)
    assert torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[0], kept[2])


def test_a_plain_generate_inside_the_block_is_untouched() -> None:
    """The hooks act only in forwards that were given the cache."""
    model, batch = tiny("llama"), left_pad([prompt(11), prompt(7)])
    expected = generate(model, None, batch["input_ids"], 10, attention_mask=batch["attention_mask"])
    with evict(model) as cache:
        generate(model, cache, batch["input_ids"], 30, attention_mask=batch["attention_mask"])
        for native in (None, DynamicCache(config=model.config)):
            found = generate(model, native, batch["input_ids"], 10, attention_mask=batch["attention_mask"])
            assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))


def test_stats_are_plain_numbers() -> None:
    """What the README promises, JSON-serialisable, and measured bytes."""
    model = tiny("llama")
    with evict(model, track_positions=True) as cache:
        assert json.loads(json.dumps(cache.stats()))["rounds"] == []
        generate(model, cache, left_pad([prompt(9), prompt(5)])["input_ids"], 50)
        stats = cache.stats(positions=True)
        kept = stats.pop("kept_positions")
        assert json.loads(json.dumps(stats)) == stats
        assert (stats["policy"], stats["protect"]) == ("random", "prompt")
        assert stats["seen"] == [58, 58]
        assert stats["prompt"] == stats["protected"] == [9, 9]
        assert stats["entries"] == [s - e for s, e in zip(stats["seen"], stats["evicted"], strict=True)]
        assert [k.shape[-1] for k in kept] == stats["entries"]
        assert stats["evicted"] == [R * n for n in stats["rounds"]] == [32, 32]
        assert stats["budget"] == [K, K]
        assert stats["grown"] == [False, False]
        size = sum(t.untyped_storage().nbytes() for layer in cache.evicting for t in (layer.k, layer.v))
        assert stats["bytes"]["entries"] == cache.nbytes() == size == 2 * 3 * 2 * 2 * (K + R) * 8 * 4
        assert stats["bytes"]["positions"] == 2 * 3 * 2 * (K + R) * 4
        parts = size + stats["bytes"]["positions"] + stats["bytes"]["policy"]  # the policy: rounds planned ahead
        assert stats["bytes"]["now"] == parts <= stats["bytes"]["peak"]
    with evict(model, budget=10, scope="grow") as cache:
        generate(model, cache, prompt(9), 20)
        assert cache.stats()["grown"] == [True]
        assert cache.stats()["budget"] == [17]
    with kvkeep.evict(model, "full") as cache:
        found = generate(model, cache, prompt(9), 40)
        assert torch.equal(found.sequences, generate(model, DynamicCache(config=model.config), prompt(9), 40).sequences)
        assert cache.stats()["rounds"] == [0]
        assert cache.stats()["budget"] == [None]
