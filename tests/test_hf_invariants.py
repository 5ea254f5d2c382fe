"""Invariants 1, 2, 3, 5, 6 and 7 of DESIGN.md on the transformers engine, on every family.

What is kept is checked against the rule after every forward, and what is computed against a plain
forward under an explicit per-head mask (``masked.py``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvkeep
from masked import Rule, check_row, close, force, masked_logits, replay
from models import CASES, counted, generate, left_pad, prompt, step, tiny

K, R = 24, 4
EVERY_CASE = pytest.mark.parametrize(("family", "attention"), CASES)
# What is asked for, and the rule that must follow from it. A prompt of 11 tokens fits into all.
POLICIES: dict[str, tuple[dict[str, Any], Rule]] = {
    "random": ({}, Rule(K, R, R, share=1)),
    "random-layer": ({"draw": "layer"}, Rule(K, R, R, share=1, draw="layer")),
    "random-model": ({"draw": "model"}, Rule(K, R, R, share=1, draw="model")),
    "random-unit": ({"unit": 2}, Rule(K, R, R, share=1, unit=2)),
    "random-none": ({"protect": "none"}, Rule(K, R, R)),
    "random-half": ({"protect": "prompt:0.5"}, Rule(K, R, R, share=0.5)),
    "random-sinks": ({"protect": "sinks:3"}, Rule(K, R, R, sinks=3)),
    "random-pins": ({"protect": "prompt+pin:13-15,20-21"}, Rule(K, R, R, share=1, pins=(13, 14, 20))),
    "random-pins-only": ({"protect": "pin:2-5"}, Rule(K, R, R, pins=(2, 3, 4))),
    "random-wide-window": ({"window": 7}, Rule(K, R, 7, share=1)),
    "random-narrow-window": ({"window": 2}, Rule(K, R, 2, share=1)),
    "random-no-window": ({"window": 0}, Rule(K, R, 0, share=1)),
    "random-growth": ({"growth": 2.0}, Rule(K, R, R, share=1, growth=2.0)),
    "random-trace": ({"scope": "trace", "budget": 12}, Rule(12, R, R, share=1, scope="trace")),
    "random-grow": ({"scope": "grow", "budget": 8}, Rule(8, R, R, share=1, scope="grow")),
    "streaming": ({"policy": "streaming"}, Rule(K, R, R, sinks=4, newest_only=True)),
    "recency": ({"policy": "recency"}, Rule(K, R, R, share=1, newest_only=True)),
    "recency-none": ({"policy": "recency", "protect": "none"}, Rule(K, R, R, newest_only=True)),
}
COMMON = ("random", "random-unit", "random-half", "streaming")
SOME = [
    (f, a, p) for f, a in CASES for p in POLICIES if p in COMMON or (f, a) in (("llama", "sdpa"), ("gemma3", "eager"))
]
REST = [(f, a, p) for f, a in CASES for p in POLICIES if (f, a, p) not in SOME]


def evict(family: str, attention: str = "sdpa", **values: Any) -> AbstractContextManager[Any]:
    """A cache with this file's budget, unless told otherwise."""
    return kvkeep.evict(tiny(family, attention), **{"budget": K, "buffer": R, "seed": 5, **values})


def check_against_mask(family: str, attention: str, policy: str, track: bool = True) -> None:
    """Seven rounds: every forward obeys the rule, every logit equals the masked reference."""
    asked, rule = POLICIES[policy]
    model, ids = tiny(family, attention), prompt(11 + 24 + 6 * R, seed=1)
    with evict(family, attention, **asked, track_positions=track) as cache:
        frames = force(model, cache, ids, 11)
        rounds = check_row(model, frames, ids, rule, 11)
        assert cache.stats()["rounds"] == [rounds]
    assert rounds >= 6


@pytest.mark.parametrize(("family", "attention", "policy"), SOME)
def test_logits_equal_a_masked_full_forward(family: str, attention: str, policy: str) -> None:
    """Invariants 2 and 3: the reference shares no code with the engine."""
    check_against_mask(family, attention, policy)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "attention", "policy"), REST)
def test_logits_equal_a_masked_full_forward_everywhere(family: str, attention: str, policy: str) -> None:
    """The same for every policy on every family, with positions replayed instead of tracked."""
    check_against_mask(family, attention, policy, track=False)


def test_the_reference_notices_a_single_entry() -> None:
    """Negative control: hide one kept entry from one head at one query, and the comparison fails by far."""
    for family, attention in (("llama", "sdpa"), ("phi3", "eager"), ("gemma3", "sdpa"), ("gpt-oss", "eager")):
        model, ids = tiny(family, attention), prompt(40, seed=1)
        with evict(family, attention, track_positions=True) as cache:
            frames = force(model, cache, ids, 11)
        visible, _ = replay(frames, POLICIES["random"][1], 11)
        right = masked_logits(model, ids, visible)
        visible[-1, 0, 39, 20] = ~visible[-1, 0, 39, 20]
        assert (masked_logits(model, ids, visible)[39] - right[39]).abs().max() > 1e-3


@EVERY_CASE
def test_a_budget_that_is_never_reached_changes_nothing(family: str, attention: str) -> None:
    """Invariant 1: bit-identical logits and tokens, in generate and token by token."""
    model, ids = tiny(family, attention), prompt(13)
    plain = generate(model, None, ids, 30)
    with evict(family, attention, budget=60) as cache:
        found = generate(model, cache, ids, 30)
        assert cache.stats()["rounds"] == [0]
    assert torch.equal(found.sequences, plain.sequences)
    assert torch.equal(torch.stack(found.logits), torch.stack(plain.logits))
    with evict(family, attention, budget=60) as cache:
        forced = [f.logits for f in force(model, cache, plain.sequences, 13)]
    native = DynamicCache(config=model.config)
    assert all(map(torch.equal, forced, [f.logits for f in force(model, native, plain.sequences, 13)]))


@EVERY_CASE
def test_padded_rows_equal_the_row_alone(family: str, attention: str) -> None:
    """Invariant 1 with padding: each row as alone under kvkeep, and as alone without it."""
    model, rows = tiny(family, attention), [prompt(13), prompt(5), prompt(9)]
    batch = left_pad(rows)
    with evict(family, attention, budget=60) as cache:
        found = generate(model, cache, batch["input_ids"], 20, attention_mask=batch["attention_mask"])
    for i, ids in enumerate(rows):
        with evict(family, attention, budget=60) as cache:
            alone = generate(model, cache, ids, 20)
        for single in (alone, generate(model, None, ids, 20)):
            assert torch.equal(found.sequences[i, 13:], single.sequences[0, ids.shape[1] :])
            close(torch.stack(found.logits)[:, i], torch.stack(single.logits)[:, 0])


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("track", [False, True])
def test_memory_is_constant_after_the_first_round(family: str, track: bool) -> None:
    """Invariant 7, measured on the tensors: K + r slots an evicting layer, from round 1 to round 12."""
    model, sizes = tiny(family), set[int]()
    with evict(family, track_positions=track) as cache:
        ids = prompt(K + 13 * R)
        step(model, cache, ids[:, :11])
        for t in range(11, ids.shape[1]):
            step(model, cache, ids[:, t : t + 1])
            if cache.stats()["rounds"][0]:
                sizes.add(cache.stats()["bytes"]["now"])
        assert cache.stats()["rounds"] == [12]
        assert len(sizes) == 1
        if family == "llama":  # transformers' sliding layers hold the whole prompt until their second forward
            assert cache.stats()["bytes"]["peak"] == sizes.pop()
        assert all(layer.k.shape[2] == layer.v.shape[2] == K + R for layer in cache.evicting)


@pytest.mark.parametrize("track", [False, True])
@pytest.mark.parametrize("lengths", [[70], [70, 45], [70, 45, 9]])
def test_an_over_long_prompt_gives_its_memory_back(lengths: list[int], track: bool) -> None:
    """Invariant 7: without protection the prompt may be longer than K + r, until the rounds of all rows ran."""
    model, batch = tiny("llama"), left_pad([prompt(n) for n in lengths])
    with evict("llama", protect="none", track_positions=track) as cache:
        generate(model, cache, batch["input_ids"], 40, attention_mask=batch["attention_mask"])
        assert min(cache.stats()["rounds"]) >= 3
        assert [layer.k.shape[2] for layer in cache.evicting] == [K + R] * 3


@pytest.mark.parametrize(
    "values",
    [{"protect": "prompt+pin:15-17"}, {"keep": torch.ones(1, 1, 1, 14, dtype=torch.bool)}],
)
def test_units_with_pins_or_masks(values: dict[str, Any]) -> None:
    """Either the whole unit of a pinned entry stays, or the combination is refused before anything runs."""
    model, refused = tiny("llama"), ""
    with counted(model) as forwards:
        try:
            with evict("llama", unit=2, **values) as cache:
                generate(model, cache, prompt(11), 60)
                kept = cache.kept_positions()
        except ValueError as error:
            refused = str(error)
    if refused:
        assert "unit" in refused
        assert not forwards
        return
    assert all(bool((kept == p).any(-1).all()) for p in ([15, 16] if "protect" in values else [11, 12, 13]))
