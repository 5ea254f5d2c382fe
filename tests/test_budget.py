"""Budget arithmetic: a wrong number here silently keeps too little or overflows the cache later."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvkeep.budget import Budget, round_up


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"total": 0}, ["total", "at least 1", "0"]),
        ({"total": -5}, ["total", "-5"]),
        ({"total": 16.0}, ["total", "whole number", "16.0"]),
        ({"total": "16"}, ["total", "whole number", "'16'"]),
        ({"total": True}, ["total", "whole number", "True"]),
        ({"every": 0}, ["every", "at least 1", "0"]),
        ({"every": 2.5}, ["every", "2.5"]),
        ({"window": -2}, ["window", "at least 0", "-2"]),
        ({"align": 0}, ["align", "at least 1", "0"]),
        ({"room": -3}, ["room", "at least 0", "-3"]),
        ({"total": 4, "every": 4, "window": 0}, ["budget 4", "buffer 4", "Raise the budget"]),
        ({"total": 3, "every": 4, "window": 0}, ["budget 3", "buffer 4"]),
        ({"total": 8, "window": 9}, ["budget 8", "window 9", "lower the window"]),
        ({"growth": 0.5}, ["growth", "at least 1", "0.5"]),
        ({"growth": 0}, ["growth", "0"]),
        ({"growth": float("nan")}, ["growth", "nan"]),
        ({"scope": "prompt"}, ["scope", "total, trace, grow", "'prompt'"]),
        ({"scope": "grow", "room": 3}, ["room 3", "window 4"]),
    ],
)
def test_refusals_name_the_value(fields: dict[str, Any], says: list[str]) -> None:
    """A message without the offending value sends people to the debugger."""
    with pytest.raises(ValueError) as caught:
        Budget(**{"total": 16, "every": 4, **fields})
    for part in says:
        assert part in str(caught.value)


def test_defaults_follow_the_buffer() -> None:
    """`buffer=r` is short for every = window = r; the least room leaves a choice of r."""
    budget = Budget(16, 4)
    assert (budget.window, budget.room, budget.scope, budget.align) == (4, 8, "total", 1)
    assert (Budget(16, 4, 2).window, Budget(16, 4, 2).room) == (2, 6)
    assert Budget(16, 4, 0).window == 0  # 0 is a window of its own, not "unset"


def test_edges_that_are_allowed() -> None:
    """The smallest budgets that make sense are not refused by an off-by-one."""
    assert Budget(2, 1, 0).kept(0) == 2
    assert Budget(5, 4, 5).window == 5  # window == total: only the newest
    assert Budget(16, 4, growth=1).growth == 1
    assert Budget(16, 4, scope="grow", room=4).room == 4


def test_round_up() -> None:
    assert [round_up(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert round_up(7, 1) == 7


def test_total_counts_the_prompt_and_refuses_from_one_too_many() -> None:
    """K is the total: prompt + window may fill it exactly, one more is refused with what to do."""
    budget = Budget(16, 4, 3)
    assert budget.for_prompt(13).total == 16  # 13 + 3 == 16
    with pytest.raises(ValueError) as caught:
        budget.for_prompt(14)
    for part in ("14 protected", "window of 3", "at least 17", "got 16", 'scope="grow"', 'scope="trace"'):
        assert part in str(caught.value)


def test_total_does_not_refuse_what_is_not_protected() -> None:
    """An unprotected prompt longer than the budget is evicted, not refused: only protected entries must stay."""
    assert Budget(16, 4).for_prompt(1000, protected=0).total == 16
    assert Budget(16, 4).for_prompt(1000, protected=12).total == 16
    with pytest.raises(ValueError, match=re.escape("13 protected")):
        Budget(16, 4).for_prompt(1000, protected=13)
    with pytest.raises(ValueError, match="protected"):
        Budget(16, 4).for_prompt(2, protected=13)  # pins beyond the prompt count as well


def test_total_ignores_align() -> None:
    """K as configured is not rounded behind the user's back."""
    assert Budget(17, 4, align=8).for_prompt(3).total == 17


@pytest.mark.parametrize(("align", "expected"), [(1, 16 + 13), (4, 32), (32, 32), (29, 29), (30, 30)])
def test_trace_adds_the_prompt(align: int, expected: int) -> None:
    """The budget counts only the trace: K + Lp, rounded up for a paged engine."""
    resolved = Budget(16, 4, scope="trace", align=align).for_prompt(13)
    assert resolved.total == expected
    assert resolved.scope == "total"


def test_trace_counts_the_prompt_even_where_it_is_not_protected() -> None:
    assert Budget(16, 4, scope="trace").for_prompt(100, protected=4).total == 116


def test_trace_still_needs_room_for_pins() -> None:
    """Pins can exceed K + Lp - w: the one way `trace` can fail."""
    budget = Budget(16, 4, scope="trace")
    assert budget.for_prompt(2, protected=14).total == 18
    with pytest.raises(ValueError, match="15 protected"):
        budget.for_prompt(2, protected=15)


@pytest.mark.parametrize(
    ("prompt", "protected", "align", "expected"),
    [
        (8, None, 1, 16),  # 8 + room 8 fits K exactly
        (9, None, 1, 17),  # one more grows by one
        (9, None, 8, 24),
        (8, None, 8, 16),
        (1000, 0, 1, 16),  # nothing protected: nothing to grow for
        (1000, 9, 1, 17),
    ],
)
def test_grow_brings_its_own_budget(prompt: int, protected: int | None, align: int, expected: int) -> None:
    """max(K, roundup(protected + room, align))."""
    assert Budget(16, 4, scope="grow", align=align).for_prompt(prompt, protected).total == expected


def test_grow_rounds_only_what_depends_on_the_prompt() -> None:
    """K itself may be no multiple of align; a prompt that fits leaves it alone."""
    assert Budget(17, 4, scope="grow", align=8).for_prompt(2).total == 17
    assert Budget(17, 4, scope="grow", align=8).for_prompt(10).total == 24


def test_grow_with_own_room() -> None:
    assert Budget(16, 4, scope="grow", room=20).for_prompt(10).total == 30


def test_resolving_twice_changes_nothing() -> None:
    """A resolved budget is scope=total, so an engine that resolves again cannot add the prompt twice."""
    for scope in ("total", "trace", "grow"):
        once = Budget(16, 4, 3, 2.0, scope, 4).for_prompt(11)
        assert once.for_prompt(11) == once
        assert (once.every, once.window, once.growth, once.align) == (4, 3, 2.0, 4)


def test_negative_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        Budget(16, 4).for_prompt(-1)


def test_constant_budget_limits() -> None:
    """The cache never holds more than K + r, before the first round and after the hundredth."""
    budget = Budget(16, 4)
    assert [budget.kept(n) for n in (0, 1, 100)] == [16, 16, 16]
    assert [budget.limit(n) for n in (0, 1, 100)] == [20, 20, 20]


def test_growth_adds_r_over_c_a_round() -> None:
    """RPC / InfoKV: after round n a head holds K + floor(n r / c); the next round waits for r more."""
    budget = Budget(16, 4, growth=3)
    assert [budget.kept(n) for n in range(7)] == [16, 17, 18, 20, 21, 22, 24]
    assert [budget.limit(n) for n in range(5)] == [18, 20, 21, 22, 24]
    for number in range(200):
        assert budget.limit(number) == budget.kept(number - 1) + 4
        assert 0 <= budget.limit(number) - budget.kept(number) <= 4  # a round frees at most r, never less than 0


def test_growth_of_one_evicts_nothing() -> None:
    """c = 1 grows as fast as tokens arrive: the extreme that must not go negative."""
    budget = Budget(16, 4, growth=1)
    assert all(budget.limit(n) - budget.kept(n) == 0 for n in range(50))


def test_growth_survives_the_prompt() -> None:
    """A request's K starts from its own total, and then grows at the same pace."""
    resolved = Budget(16, 4, growth=2, scope="trace").for_prompt(10)
    assert [resolved.kept(n) for n in range(3)] == [26, 28, 30]
