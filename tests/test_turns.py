"""Second turns: the new prompt becomes slots [P, P + n), and nobody is lost who need not be."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from checks import check_event, check_row
from kvkeep.budget import Budget
from kvkeep.layout import Row
from kvkeep.policies import RandomAttention, Recency
from kvkeep.protection import Protection
from reference import Slots

PROMPT = Protection.parse("prompt")


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Slots, list[tuple[int, int]]]:
    """Some tokens, a turn, some tokens, a turn, ...: sizes that just fit, and sizes that fit with room."""
    r, w, P = draw(st.integers(1, 5)), draw(st.integers(0, 6)), draw(st.integers(0, 5))
    steps = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 7)), min_size=1, max_size=3))
    scope = draw(st.sampled_from(["total", "total", "trace", "grow"]))
    needed = P + w + (sum(n for _, n in steps) if scope == "total" else 0)
    K = max(needed, r + 1) + draw(st.sampled_from([0, 0, 1, 4, 9]))
    policy = draw(st.sampled_from([RandomAttention(), RandomAttention("layer"), Recency()]))
    growth = draw(st.sampled_from([None, None, 2, 1.5]))
    slots = Slots(policy, Budget(K, r, w, growth, scope), PROMPT, [P], [3], 1, 2, draw(st.integers(0, 9)))
    return slots, steps


@given(conversations())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_turns_keep_their_promises(conversation: tuple[Slots, list[tuple[int, int]]]) -> None:
    """Prompts of all turns stay complete and in order; exactly what has to go goes; later rounds still hold."""
    slots, steps = conversation
    slots.watch = check_event
    row, turns = slots.rows[0], list[tuple[int, int]]()
    for tokens, n in steps:
        slots.trace(tokens)
        before, evicted, held, ordered = row.cached, row.evicted, slots.kept().clone(), row.ordered
        turns.append((row.seen, n))
        P = row.protected
        slots.turn({0: n})
        lost = row.evicted - evicted
        assert row.budget is not None
        most = row.budget.kept(max(row.trace_rounds - 1, 0)) + row.budget.every
        assert lost == (0 if before + n <= most else min(n, before + n - (most - row.budget.every)))
        assert row.cached == before + n - lost <= most
        window = min(row.budget.window, ordered, before - P)
        for old, new in zip(held.flatten(0, 1).tolist(), slots.kept().flatten(0, 1).tolist(), strict=True):
            assert len(set(new)) == len(new) == row.cached
            assert new[:P] == old[:P]
            assert new[P : P + n] == list(range(row.seen - n, row.seen))
            assert set(new[P + n :]) <= set(old[P:])
            assert len(set(old) - set(new)) == lost
            assert new[len(new) - window :] == old[len(old) - window :]
    slots.rounds(2)
    check_row(slots, 0, turns)


def test_nothing_is_lost_while_it_fits() -> None:
    """K + r is the limit: one entry below it costs nobody, one above evicts."""
    for n, lost in ((4, 0), (5, 5)):
        slots = Slots(RandomAttention(), Budget(24, 4), PROMPT, [4], [0], 1, 2)
        slots.rounds(1)
        slots.turn({0: n})
        assert slots.rows[0].evicted == 4 + lost
        assert slots.rows[0].cached == 24 + n - lost


def test_a_turn_onto_a_short_cache_evicts_down_to_k_only() -> None:
    """Before the first round the cache is not at K: fewer than n make way."""
    slots = Slots(RandomAttention(), Budget(24, 4), PROMPT, [4], [0])
    slots.trace(15)
    slots.turn({0: 11})  # 19 + 11 = 30 > 28
    assert (slots.rows[0].evicted, slots.rows[0].cached) == (6, 24)


def test_turns_of_some_rows_with_rounds_of_others() -> None:
    """One plan for a turn in row 0, a round in row 1 and a turn in row 3; row 2 rests. All as if alone."""
    budget, prompts, before = Budget(24, 4), [5, 4, 2, 7], {0: 6, 3: 3}
    together = Slots(RandomAttention(), budget, PROMPT, prompts, [5, 6, 7, 8], 2, 3)
    together.watch = check_event
    together.trace(24)  # 28 - 4: row 1 is due
    assert [row.needs_round() for row in together.rows] == [False, True, False, False]
    together.turn(before)
    together.trace(30)
    for i, n in enumerate(prompts):
        alone = Slots(RandomAttention(), budget, PROMPT, [n], [5 + i], 2, 3)
        alone.trace(24)
        if i in before:
            alone.turn({0: before[i]})
        alone.trace(30)
        assert torch.equal(alone.kept(), together.kept(i))


def test_a_turn_draws_afresh() -> None:
    """The round after a turn must not repeat the turn's draw: both count in the round number."""
    slots = Slots(RandomAttention(), Budget(24, 4), PROMPT, [4], [0])
    numbers: list[int] = []
    slots.watch = lambda self, which, events, *rest: numbers.extend(e.number for e in events)
    slots.rounds(2)
    slots.turn({0: 6})
    slots.rounds(2)
    assert numbers == [0, 1, 2, 3, 4]


def test_a_turn_right_after_the_prompt_just_extends_it() -> None:
    """No trace yet: nothing has to move, the protected prefix grows in place."""
    slots = Slots(RandomAttention(), Budget(24, 4), PROMPT, [4], [0], 1, 2)
    assert slots.rows[0].next_turn(5) is None
    slots.turn({0: 5})
    assert slots.rows[0].protected == 9
    assert slots.kept().tolist() == [[list(range(9))] * 2]


def test_unprotected_turns_are_appended() -> None:
    """Without a protected prompt a turn is text like any other: behind the newest, in order."""
    for protection in ("none", "sinks:4"):
        slots = Slots(RandomAttention(), Budget(24, 4), Protection.parse(protection), [6], [0], 1, 2)
        slots.trace(5)
        assert slots.rows[0].next_turn(7) is None
        slots.turn({0: 7})
        assert slots.kept().tolist() == [[list(range(18))] * 2]
        slots.rounds(1)
        check_row(slots, 0)


def test_scopes_count_the_new_turn() -> None:
    """trace: K grows by the turn; grow: only as far as protected + room asks for it; total: not at all."""
    for scope, kept in (("total", 24), ("trace", 24 + 4 + 9), ("grow", 24)):
        slots = Slots(RandomAttention(), Budget(24, 4, scope=scope), PROMPT, [4], [0])
        slots.trace(40)
        slots.turn({0: 9})
        slots.rounds(2)
        assert slots.rows[0].cached == kept
    grown = Slots(RandomAttention(), Budget(24, 4, scope="grow"), PROMPT, [4], [0])
    grown.trace(40)
    grown.turn({0: 30})
    grown.rounds(1)
    assert grown.rows[0].cached == 34 + 8
    check_row(grown, 0, [(44, 30)])


def started(budget: Budget, protection: str, prompt: int = 4, unit: int = 1) -> Row:
    row = Row.new(budget, Protection.parse(protection), unit)
    row.add_prompt(prompt)
    row.add_trace(budget.total - prompt)
    return row


def test_refusals_say_what_to_do() -> None:
    """A turn that does not fit is refused before anything is moved or counted."""
    row = started(Budget(16, 4), "prompt")
    assert row.next_turn(8) is not None  # 4 + 8 + window 4 == 16
    with pytest.raises(
        ValueError, match=r"13 protected entries and a window of 4 need a budget of at least 17, got 16"
    ):
        row.next_turn(9)
    assert (row.cached, row.protected, row.prompt_length, row.rounds) == (16, 4, 4, 0)
    for protection in ("prompt", "none"):  # unprotected too: its rounds would have to cut units
        with pytest.raises(ValueError, match="unit=1"):
            started(Budget(16, 4), protection, unit=2).next_turn(3)
    with pytest.raises(ValueError, match="a share of a turn is not defined"):
        started(Budget(16, 4), "prompt:0.5").next_turn(3)


def test_a_prompt_that_does_not_fit_is_refused_with_its_first_excess_token() -> None:
    """The prompt may come in chunks; it is refused as soon as it cannot fit, and never cut."""
    row = Row.new(Budget(16, 4), PROMPT)
    row.add_prompt(7)
    row.add_prompt(5)
    assert row.protected == 12
    with pytest.raises(ValueError, match="13 protected"):
        row.add_prompt(1)


def test_a_row_without_a_budget_never_evicts() -> None:
    row = Row.new(None, PROMPT)
    row.add_prompt(1000)
    row.add_trace(100_000)
    assert row.limit is None
    assert row.space() is None
    assert not row.needs_round()
    assert row.next_turn(10) is None
    with pytest.raises(ValueError, match="without a budget"):
        row.next_round()
