"""Regressions of the cache: interruptions, prompt_length, masks of probes, kept positions."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvkeep.hf import moves
from kvkeep.policies import Policy
from kvkeep.policies.base import PolicyScope
from kvkeep.signals import POSITIONS, RoundView
from masked import Rule, check_row, close, force
from models import CACHE, counted, generate, left_pad, prompt, step, tiny
from small import K, R, bools, evict

# ---- masks of probes ----------------------------------------------------------------------------


def test_an_override_after_the_prompt_that_asks_for_too_much() -> None:
    """Beside 11 prompt tokens and a window of 4 there is room for 9: refused at once, not in some later round."""
    model, ids = tiny("llama"), prompt(70, seed=4)
    with evict(model) as cache:
        step(model, cache, ids[:, :11])
        with pytest.raises(ValueError, match="ask for 10 entries of a head beside 11 protected"):
            cache.override(keep=bools([*range(12, 22)]))
        cache.override(keep=bools([*range(12, 21)]))
        for t in range(11, 70):
            step(model, cache, ids[:, t : t + 1])
        assert bool((cache.kept_positions()[..., :20] == torch.tensor([*range(11), *range(12, 21)])).all())


def test_a_refused_override_leaves_the_masks_as_they_were() -> None:
    """A refusal leaves no trace: the masks that were set before go on."""
    model, ids = tiny("llama"), prompt(70, seed=4)
    with evict(model, keep=bools([13, 17])) as expected:
        force(model, expected, ids, 11)
    with evict(model, keep=bools([13, 17])) as cache:
        step(model, cache, ids[:, :11])
        with pytest.raises(ValueError, match="ask for 10"):
            cache.override(keep=bools([*range(12, 22)]))
        for t in range(11, 70):
            step(model, cache, ids[:, t : t + 1])
        assert torch.equal(cache.kept_positions(), expected.kept_positions())


def test_kept_and_pinned_entries_are_counted_together() -> None:
    """5 pins leave room for 4 more; what is both pinned and kept counts once. The user's mask is not touched."""
    model, ids, given = tiny("llama"), prompt(70, seed=4), bools([*range(15, 20), 21, 22, 23, 25])
    with evict(model, protect="prompt+pin:15-20", keep=bools([21, 22, 23, 25, 26])) as cache:
        with counted(model) as forwards, pytest.raises(ValueError, match="keep and pins ask for 10 entries"):
            step(model, cache, ids[:, :11])
        assert not forwards
    for keep in (given, bools([21, 22, 23, 25])):
        before = keep.clone()
        with evict(model, protect="prompt+pin:15-20", keep=keep) as cache:
            force(model, cache, ids, 11)
            wanted = [*range(11), *range(15, 20), 21, 22, 23, 25]
            assert bool((cache.kept_positions()[..., :20] == torch.tensor(wanted)).all())
        assert torch.equal(keep, before)


def test_a_turn_that_cannot_hold_what_is_kept() -> None:
    """26 protected entries, 14 kept ones and a window of 4 do not fit into 40; without the mask they would."""
    model, ids = tiny("llama"), prompt(90, seed=4)
    with evict(model, budget=40, keep=bools([*range(12, 26)])) as cache, evict(model, budget=40) as free:
        for used in (cache, free):
            force(model, used, ids[:, :60], 11)
        before, kept = cache.stats(), cache.kept_positions()
        with cache.as_prompt(), counted(model) as forwards, pytest.raises(ValueError, match="keep and pins ask for 14"):
            step(model, cache, ids[:, 60:75])
        assert not forwards
        assert cache.stats() == before
        assert torch.equal(cache.kept_positions(), kept)
        step(model, cache, ids[:, 60:61])
        with free.as_prompt():
            step(model, free, ids[:, 60:75])


def test_masks_after_beam_search_and_reset() -> None:
    """Beams carry their masks along; the next request begins with those that were set."""
    model, ids = tiny("llama"), torch.cat([prompt(11), prompt(11, seed=1)])
    keep = bools([], rows=4)
    for row in range(4):
        keep[row, ..., 12 + row] = True
    forced = torch.cat([prompt(11, seed=2), prompt(50, seed=4)], dim=1).expand(4, -1)
    with evict(model, keep=keep) as fresh:
        force(model, fresh, forced, 11)
    with evict(model, keep=keep) as cache:
        generate(model, cache, ids, 30, num_beams=2)
        assert not torch.equal(cache._rounds.masks.keep, keep), "no beam changed its place: the test tests nothing"
        cache.reset()
        force(model, cache, forced, 11)
        for row in range(4):
            assert torch.equal(cache.kept_positions(row), fresh.kept_positions(row))
            assert bool((cache.kept_positions(row) == 12 + row).any(-1).all())


# ---- interruptions ------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", [False, True])
def test_an_interrupt_in_the_middle_of_the_moves(turn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some layers have moved, others have not: the cache must not go on, but reset() makes it new."""
    model, ids, calls = tiny("llama"), prompt(90, seed=4), list[int]()

    def interrupted(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        moved(*args)

    moved = moves.move_entries
    with evict(model, budget=40) as cache:
        force(model, cache, ids[:, :44], 11)
        cache._mode = "prompt" if turn else None
        with monkeypatch.context() as patch:
            patch.setattr(moves, "move_entries", interrupted)
            with pytest.raises(KeyboardInterrupt):
                step(model, cache, ids[:, 44 : 52 if turn else 45])
        assert len(calls) == 4
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"call reset\(\)"):
                step(model, cache, ids[:, 44:45])
        cache.reset()
        frames = force(model, cache, ids, 11)
        with evict(model, budget=40) as fresh:
            expected = force(model, fresh, ids, 11)
            assert torch.equal(cache.kept_positions(), fresh.kept_positions())
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(frames, expected, strict=True))


def test_training_with_gradient_checkpointing() -> None:
    """transformers drops the cache there, so nothing was stored and later tokens saw no prompt."""
    model = copy.deepcopy(tiny("llama"))
    model.train()
    model.gradient_checkpointing_enable()
    with evict(model) as cache:
        assert torch.is_grad_enabled()
        with pytest.raises(RuntimeError, match=r"gradient checkpointing.*model\.eval\(\)"):
            model(input_ids=prompt(9), use_cache=True, **{CACHE: cache})
        model.eval()
        cache.reset()
        found = generate(model, cache, prompt(9), 30)
    with evict(tiny("llama")) as cache:
        assert torch.equal(found.sequences, generate(tiny("llama"), cache, prompt(9), 30).sequences)


# ---- prompt_length ------------------------------------------------------------------------------


def test_a_long_prompt_and_its_trace_in_one_forward() -> None:
    """40 unprotected tokens must be cut down to K before any trace: room in the round to come does not count."""
    model, ids = tiny("llama"), prompt(70, seed=4)
    with evict(model, protect="none") as expected:
        force(model, expected, ids, 40)
    with evict(model, protect="none", prompt_length=40) as cache:
        with counted(model) as forwards, pytest.raises(ValueError, match="at most 0 fit now"):
            step(model, cache, ids[:, :42])
        assert not forwards
        force(model, cache, ids, 40)  # the refusal left no trace
        assert cache.stats()["rounds"] == expected.stats()["rounds"]
        assert torch.equal(cache.kept_positions(), expected.kept_positions())


@pytest.mark.parametrize("together", [21, 24, 28])
def test_a_prompt_and_a_trace_that_fit_in_one_forward(together: int) -> None:
    """As if they came apart: the same rounds, kept sets and logits."""
    model, ids = tiny("llama"), prompt(70, seed=4)
    with evict(model, protect="none") as apart:
        expected = torch.cat([f.logits for f in force(model, apart, ids, 20)], dim=1)
    with evict(model, protect="none", prompt_length=20) as cache:
        found = torch.cat([f.logits for f in force(model, cache, ids, together)], dim=1)
        assert cache.stats()["prompt"] == [20]
        assert cache.stats()["rounds"] == apart.stats()["rounds"]
        assert torch.equal(cache.kept_positions(), apart.kept_positions())
    close(found, expected)


# ---- kept positions -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Fickle(Policy):
    """Scores otherwise at every call, as scores of keys or queries would: rounds cannot be replayed."""

    name: ClassVar[str] = "fickle"
    calls: ClassVar[list[int]] = []

    @property
    def scope(self) -> PolicyScope:
        return "head"

    def score(self, view: RoundView) -> Tensor:
        type(self).calls.append(len(view.streams))
        shape = (len(view.streams), len(view.layers), len(view.heads), view.candidates)
        return torch.rand(shape, generator=torch.Generator().manual_seed(len(self.calls)))


@dataclass(frozen=True)
class FickleOnPositions(Fickle):
    """The same, and it sees positions."""

    name: ClassVar[str] = "fickle-positions"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS})
    calls: ClassVar[list[int]] = []


@pytest.mark.parametrize("policy", [Fickle, FickleOnPositions])
def test_positions_of_a_policy_that_reads_content(policy: type[Fickle]) -> None:
    """They are tracked: reading them asks for no scores, and says what is really in the cache."""
    model, ids = tiny("llama"), prompt(60, seed=4)
    with evict(model, policy()) as cache:
        frames = force(model, cache, ids, 11)
        asked = len(policy.calls)
        first, second = cache.kept_positions(), cache.kept_positions()
        assert torch.equal(first, second)
        assert len(policy.calls) == asked > 0
        assert cache.stats()["bytes"]["positions"] > 0
    assert check_row(model, frames, ids, Rule(K, R, R, share=1), 11) >= 6


def test_positions_of_rows_that_are_not_there() -> None:
    """-1 is not the last row: it read the first row's draws."""
    model, batch = tiny("llama"), left_pad([prompt(11), prompt(7)])
    for track in (False, True):
        with evict(model, track_positions=track) as cache:
            generate(model, cache, batch["input_ids"], 30, attention_mask=batch["attention_mask"])
            for row in (-1, 2, 5):
                with pytest.raises(ValueError, match=f"no row {row}: the cache holds 2 rows"):
                    cache.kept_positions(row)
