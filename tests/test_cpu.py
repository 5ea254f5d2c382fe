"""What makes a round cheap changes nothing: numpy for torch, one bound for topk, several rounds at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvkeep.plan
from kvkeep import cpu, draws
from kvkeep.bench.common import tiny_model
from kvkeep.bench.decode import Runner, random_ids
from kvkeep.hf import rounds
from kvkeep.layout import Round
from kvkeep.plan import plan
from kvkeep.settings import Settings

WORDS = st.integers(-(2**63), 2**63 - 1)


@settings(deadline=None, max_examples=50)
@given(
    st.integers(-(2**70), 2**70), st.lists(WORDS, min_size=1, max_size=3), st.integers(0, 2**40), st.integers(1, 700)
)
def test_draws_have_the_same_bits_in_numpy_and_torch(seed: int, streams: list[int], number: int, width: int) -> None:
    arguments = (
        seed,
        torch.tensor(streams),
        torch.tensor([0, 3, 61]),
        torch.arange(2),
        torch.arange(number, number + len(streams)),
    )
    words = cpu.round_words(*arguments)
    assert torch.equal(words, draws._round_words(*arguments))
    ranks = torch.arange(width, dtype=torch.int32)
    assert torch.equal(cpu.rank_keys(words, ranks), draws._rank_keys(words, ranks))


def test_keys_are_the_same_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    words, ranks = torch.arange(7).view(1, 7, 1) * -(2**60), torch.arange(300, dtype=torch.int32)
    whole = draws._rank_keys(words, ranks)
    for block in (1, 299, 650, 10**6):
        monkeypatch.setattr(cpu, "_BLOCK", block)
        assert torch.equal(cpu.rank_keys(words, ranks), whole)


@pytest.mark.parametrize(("candidates", "victims"), [(120, 8), (1984, 64), (500, 1), (300, 100), (64, 64)])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_short_cut_plans_the_same_moves(
    candidates: int, victims: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = torch.arange(rows * 4).view(rows, 2, 2) * 0x1234567812345678
    keys = draws.rank_keys(words, torch.arange(candidates, dtype=torch.int32))
    events = [Round(i, 17, candidates, victims, victims) for i in range(rows)]
    taken = []
    monkeypatch.setattr(kvkeep.plan, "_lowest_draws", lambda *a: taken.append(cpu.lowest_draws(*a)) or taken[-1])
    short = plan(keys, events)
    assert (taken[0] is not None) == (2 * (victims + 5 * victims**0.5) <= candidates)
    monkeypatch.setattr(kvkeep.plan, "_lowest_draws", lambda *a: None)
    whole = plan(keys, events)
    assert torch.equal(short.src, whole.src)
    assert torch.equal(short.dst, whole.dst)


@pytest.mark.parametrize(
    "options",
    [{}, {"draw": "layer"}, {"track_positions": True}, {"growth": 2.0}, {"unit": 4}, {"protect": "none"}],
)
def test_rounds_planned_ahead_are_the_rounds_planned_one_by_one(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a turn comes in between, or the batch is cut down to some of its rows."""
    model = tiny_model(torch.device("cpu"), hidden_size=32, intermediate_size=32, num_hidden_layers=2)
    found = []
    for ahead in (1, 8):
        monkeypatch.setattr(rounds, "_AHEAD", ahead)
        runner = Runner(model, Settings.of("random", budget=96, buffer=8, **options))
        cache: Any = runner.cache
        with torch.inference_mode():
            runner.fill(random_ids(model, 3, 200, seed=2))
            if not options.get("unit"):
                with cache.as_prompt():
                    runner._forward(random_ids(model, 3, 5, seed=3))
            runner.steps(30)
            cache.batch_select_indices(torch.tensor([2, 0]))
            runner.next = runner.next[[2, 0]]
            runner.steps(30)
        found.append((cache.kept_positions(0), cache.kept_positions(1), runner.next))
        runner.close()
    for one, eight in zip(*found, strict=True):
        assert torch.equal(one, eight)


def test_several_rounds_are_planned_at_once_only_where_they_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(torch.device("cpu"), hidden_size=32, intermediate_size=32, num_hidden_layers=2)
    planned = []
    whole = rounds.Rounds._plan_ahead

    def spy(self: rounds.Rounds, *arguments: Any) -> Any:
        plans = whole(self, *arguments)
        planned.append(len(plans))
        return plans

    monkeypatch.setattr(rounds.Rounds, "_plan_ahead", spy)
    for policy, options, expected in (
        ("random", {}, [8, 8]),
        ("random", {"growth": 2.0}, [1] * 13),
        ("random", {"protect": "prompt+pin:80-82"}, [1] * 13),
        ("recency", {}, [1] * 13),
    ):
        planned.clear()
        runner = Runner(model, Settings.of(policy, budget=96, buffer=8, **options))
        with torch.inference_mode():
            runner.fill(random_ids(model, 1, 202, seed=2))
        runner.close()
        assert planned == expected, (policy, options)
