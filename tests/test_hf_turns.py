"""Invariants 5 and 6 of DESIGN.md on the transformers engine: batches, chunks, later turns.

Kept sets of content-free policies must not depend on how a request is run, and every later forward,
of one token or of several, must use the right positions and see the right entries.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvkeep
from masked import Frame, Rule, check_row, close, force, taped
from models import CACHE, CASES, generate, left_pad, prompt, step, tiny

K, R = 24, 4
SHAPES = pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("gemma3", "sdpa"), ("gpt-oss", "eager")])
RUNS: dict[str, dict[str, Any]] = {
    "random": {},
    "layer": {"draw": "layer"},
    "unit": {"unit": 2},
    "none": {"protect": "none"},
    "sinks": {"protect": "sinks:3"},
    "pins": {"protect": "prompt+pin:16-18"},
    "recency": {"policy": "recency"},
    "streaming": {"policy": "streaming"},
}


def evict(model: Any, **values: Any) -> Any:
    return kvkeep.evict(model, **{"budget": K, "buffer": R, "seed": 7, **values})


def run(model: Any, ids: Tensor, new: int, mask: Tensor | None = None, chunk: int | None = None, **values: Any) -> Any:
    """One generate: (what it returned, kept positions of every row)."""
    extra: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
    if chunk is not None:
        extra["prefill_chunk_size"] = chunk
    with evict(model, **values) as cache:
        found = generate(model, cache, ids, new, **extra)
        return found, [cache.kept_positions(i) for i in range(ids.shape[0])]


# ---- invariant 5 --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", RUNS)
@SHAPES
def test_a_row_keeps_the_same_alone_and_in_a_padded_batch(family: str, attention: str, policy: str) -> None:
    """Lengths that give the rows different phases of their rounds; tokens and logits must agree too."""
    model, rows = tiny(family, attention), [prompt(13), prompt(6), prompt(9)]
    batch = left_pad(rows)
    found, kept = run(model, batch["input_ids"], 40, batch["attention_mask"], **RUNS[policy])
    for i, ids in enumerate(rows):
        alone, lonely = run(model, ids, 40, **RUNS[policy])
        assert torch.equal(kept[i], lonely[0])
        assert torch.equal(found.sequences[i, 13:], alone.sequences[0, ids.shape[1] :])
        close(torch.stack(found.logits)[:, i], torch.stack(alone.logits)[:, 0])


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_padded_rows_equal_the_masked_reference(family: str, attention: str) -> None:
    """Invariant 2 where rows hold different numbers of entries."""
    model, lengths = tiny(family, attention), [13, 6, 9]
    batch = left_pad([prompt(n) for n in lengths])
    with evict(model, track_positions=True) as cache, taped(model, cache) as frames:
        found = generate(model, cache, batch["input_ids"], 40, attention_mask=batch["attention_mask"])
    for i, n in enumerate(lengths):
        assert check_row(model, frames, found.sequences[i : i + 1, 13 - n :], Rule(K, R, R, share=1), n, i, 13) >= 4


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 12])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_chunked_prefill_keeps_the_same(family: str, padded: bool, chunk: int) -> None:
    """Also where the last chunk is one token (13 = 12 + 1 = 4 * 3 + 1): it is still prompt."""
    model, rows = tiny(family), [prompt(13), prompt(6)] if padded else [prompt(13)]
    batch = left_pad(rows)
    whole, kept = run(model, batch["input_ids"], 30, batch["attention_mask"])
    parts, same = run(model, batch["input_ids"], 30, batch["attention_mask"], chunk)
    assert torch.equal(whole.sequences, parts.sequences)
    close(torch.stack(whole.logits), torch.stack(parts.logits))
    assert all(map(torch.equal, kept, same))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_prefill_in_chunks_by_hand(family: str) -> None:
    """Bare forwards of a padded batch: a row whose prompt begins in a later chunk is not an empty row."""
    model, rows = tiny(family), [prompt(13), prompt(3)]
    batch, trace = left_pad(rows), prompt(40, seed=2).expand(2, -1)
    ids = torch.cat([batch["input_ids"], trace], dim=1)
    mask = torch.cat([batch["attention_mask"], torch.ones_like(trace)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with evict(model, track_positions=True) as cache, taped(model, cache) as frames:
        for first, end in [(0, 5), (5, 9), (9, 13), *((t, t + 1) for t in range(13, 53))]:
            part = {"attention_mask": mask[:, :end], "position_ids": positions[:, first:end]}
            step(model, cache, ids[:, first:end], **part)
    for i, row in enumerate(rows):
        n = row.shape[1]
        assert check_row(model, frames, ids[i : i + 1, 13 - n :], Rule(K, R, R, share=1), n, i, 13) >= 4


@pytest.mark.parametrize("policy", RUNS)
def test_attention_implementations_keep_the_same(policy: str) -> None:
    """sdpa, eager, another family of the same shape, and tracked or replayed positions: one kept set."""
    ids, kept = prompt(13), []
    for family, attention in (("llama", "sdpa"), ("llama", "eager"), ("qwen3", "sdpa")):
        for track in (False, True):
            kept += run(tiny(family, attention), ids, 40, track_positions=track, **RUNS[policy])[1]
    assert all(torch.equal(kept[0], other) for other in kept)


def test_rows_draw_by_themselves() -> None:
    """Equal prompts are samples 0, 1, 2; a row alone with its number keeps the same; a seed changes all."""
    model, ids = tiny("llama"), prompt(11)
    forced = torch.cat([ids, prompt(45, seed=3)], dim=1)

    def kept(rows: int, **values: Any) -> list[Tensor]:
        with evict(model, **values) as cache:
            force(model, cache, forced.expand(rows, -1), 11)
            return [cache.kept_positions(i) for i in range(rows)]

    three = kept(3)
    assert not torch.equal(three[0], three[1])
    assert not torch.equal(three[1], three[2])
    assert torch.equal(three[0], kept(1)[0])
    for number in (1, 2):
        assert torch.equal(three[number], kept(1, samples=[number])[0])
    assert not torch.equal(three[0], kept(1, seed=8)[0])
    assert all(map(torch.equal, kept(2, samples=[4, 4]), kept(1, samples=[4]) * 2))


# ---- invariant 6: later turns -------------------------------------------------------------------


def converse(
    model: Any, cache: Any, first: dict[str, Tensor], news: list[int], turns: list[int], chunk: int | None = None
) -> tuple[list[Frame], Tensor, list[range]]:
    """Generate, add a turn, generate again, ...: (forwards, all ids [B, T], columns of the later turns)."""
    ids, mask, columns = first["input_ids"], first["attention_mask"], list[range]()
    with taped(model, cache) as frames:
        for i, new in enumerate(news):
            if i:
                fed = ids.shape[1] - 1  # the last generated token is fed with the turn
                ids = torch.cat([ids, prompt(turns[i - 1], seed=20 + i).expand(ids.shape[0], -1)], dim=1)
                columns.append(range(fed, ids.shape[1]))
            mask = torch.cat([mask, mask.new_ones(ids.shape[0], ids.shape[1] - mask.shape[1])], dim=1)
            extra = {} if chunk is None else {"prefill_chunk_size": chunk}
            ids = generate(model, cache, ids, new, attention_mask=mask, **extra).sequences
    return frames, ids, columns


TALKS: dict[str, tuple[dict[str, Any], Rule, list[int], list[int]]] = {
    # settings, rule, tokens generated before and after each turn, tokens of the turns
    "one that fits": ({"budget": 40}, Rule(40, R, R, share=1), [6, 60], [7]),
    "one that evicts": ({"budget": 40}, Rule(40, R, R, share=1), [50, 40], [7]),
    "three": ({"budget": 48}, Rule(48, R, R, share=1), [7, 44, 30, 40], [4, 8, 5]),
    "wide window": ({"budget": 48, "window": 9}, Rule(48, R, 9, share=1), [20, 30, 30], [6, 6]),
    "layer": ({"budget": 40, "draw": "layer"}, Rule(40, R, R, share=1, draw="layer"), [40, 40], [7]),
    "recency": ({"budget": 40, "policy": "recency"}, Rule(40, R, R, share=1, newest_only=True), [40, 40], [7]),
    "grow": ({"budget": 20, "scope": "grow"}, Rule(20, R, R, share=1, scope="grow"), [30, 40], [9]),
    "trace": ({"budget": 16, "scope": "trace"}, Rule(16, R, R, share=1, scope="trace"), [40, 40], [9]),
    "unprotected": ({"budget": 24, "protect": "none"}, Rule(24, R, R), [30, 40], [9]),
    "unprotected and long": ({"budget": 24, "protect": "none"}, Rule(24, R, R), [30, 30, 20], [33, 5]),
    "streaming": ({"budget": 24, "policy": "streaming"}, Rule(24, R, R, sinks=4, newest_only=True), [30, 40], [9]),
    "pins": (
        {"budget": 40, "protect": "prompt+pin:15-18"},
        Rule(40, R, R, share=1, pins=(15, 16, 17)),
        [50, 40],
        [7],
    ),
}


@pytest.mark.parametrize("talk", TALKS)
@SHAPES
def test_later_turns(family: str, attention: str, talk: str) -> None:
    """A turn through ``generate`` with the full ids: protected completely, every logit as in the reference."""
    asked, rule, news, turns = TALKS[talk]
    model, ids = tiny(family, attention), prompt(11)
    with evict(model, track_positions=talk not in ("three", "layer"), **asked) as cache:
        frames, all_ids, columns = converse(model, cache, left_pad([ids]), news, turns)
        kept = cache.kept_positions()
    assert check_row(model, frames, all_ids, rule, 11, turns=columns) >= 4
    if rule.share:
        for position in [*range(11), *(p for turn in columns for p in turn)]:
            assert bool((kept == position).any(-1).all())


@pytest.mark.skipif(CACHE != "cache", reason="older transformers feed the whole conversation again, in chunks")
@pytest.mark.parametrize("chunk", [1, 3, 4])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_later_turn_in_chunks(family: str, chunk: int) -> None:
    """Turns of 8 and 10 columns: 3 + 3 + 2, 4 + 4; 3 + 3 + 3 + 1, 4 + 4 + 2. All of it is protected."""
    model = tiny(family)
    with evict(model, budget=48, track_positions=True) as cache:
        frames, ids, columns = converse(model, cache, left_pad([prompt(12)]), [40, 20, 30], [7, 9], chunk)
        assert cache.stats()["protected"] == [12 + 8 + 10]
    assert check_row(model, frames, ids, Rule(48, R, R, share=1), 12, turns=columns) >= 6


@pytest.mark.parametrize("protect", ["prompt", "none"])
@SHAPES
def test_later_turns_of_a_padded_batch(family: str, attention: str, protect: str) -> None:
    """Rows whose rounds are out of step take a turn at the same time; one of them evicts, another does not."""
    model, lengths, rule = tiny(family, attention), [13, 6, 9], Rule(40, R, R, share=float(protect == "prompt"))
    for news, turns in (([30, 30], [6]), ([27, 5, 40], [6, 3])):
        with evict(model, budget=40, protect=protect, track_positions=True) as cache:
            batch = left_pad([prompt(n) for n in lengths])
            frames, ids, columns = converse(model, cache, batch, news, turns)
        for i, n in enumerate(lengths):
            assert check_row(model, frames, ids[i : i + 1, 13 - n :], rule, n, i, 13, columns) >= 3


def test_a_turn_without_generate() -> None:
    """A bare forward inside ``as_prompt`` is a turn, also of a single token."""
    model, ids = tiny("llama"), prompt(100, seed=2)
    with evict(model, budget=40) as cache, taped(model, cache) as frames:
        sizes = [11, *[1] * 40, 6, *[1] * 9, 1, *[1] * 20]
        first = 0
        for i, n in enumerate(sizes):
            part = ids[:, first : first + n]
            if i in (41, 51):
                with cache.as_prompt():
                    step(model, cache, part)
            else:
                step(model, cache, part)
            first += n
        assert cache.stats()["prompt"] == [18]
    turns = [range(51, 57), range(66, 67)]
    assert check_row(model, frames, ids[:, :first], Rule(40, R, R, share=1), 11, turns=turns) >= 6


def test_a_turn_before_the_pinned_positions() -> None:
    """Pins that are still to come need no room yet: a turn for which nothing has to go is not refused."""
    model, ids = tiny("llama"), prompt(70, seed=2)
    with evict(model, budget=40, protect="prompt+pin:16-18") as cache, taped(model, cache) as frames:
        for first, end in [(0, 6), (6, 7), (7, 14), *((t, t + 1) for t in range(14, 70))]:
            if first == 7:
                with cache.as_prompt():
                    step(model, cache, ids[:, first:end])
            else:
                step(model, cache, ids[:, first:end])
    rule = Rule(40, R, R, share=1, pins=(16, 17))
    assert check_row(model, frames, ids, rule, 6, turns=[range(7, 14)]) >= 6
