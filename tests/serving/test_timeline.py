"""A request's slots and rounds as functions of the position, against the row that goes through them token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.layout import Row
from kvkeep.vllm.config import Serving
from kvkeep.vllm.requests import Tracked
from kvkeep.vllm.steps import Rows
from kvkeep.vllm.timeline import Timeline


@st.composite
def servings(draw: st.DrawFn) -> Serving:
    buffer = draw(st.integers(1, 9))
    return Serving.parse(
        {
            "policy": draw(st.sampled_from(["random", "recency", "streaming"])),
            "budget": draw(st.integers(buffer + 1, 40)),
            "buffer": buffer,
            "window": draw(st.integers(0, buffer)),
            "scope": draw(st.sampled_from(["grow", "trace"])),
            "align": draw(st.sampled_from([1, 4])),
            "protect": draw(st.sampled_from(["prompt", "prompt:0.5", "sinks:2", "none"])),
        }
    )


def walk(serving: Serving, prompt: int, tokens: int) -> list[tuple[int, int, int]]:
    """(slot, rounds so far, entries evicted so far) of each token, from the row itself."""
    row = Row.new(serving.budget, serving.settings.protection)
    row.add_prompt(prompt)
    seen = [(p, 0, 0) for p in range(prompt)]
    for _ in range(prompt, tokens):
        if row.needs_round():
            row.apply(row.next_round())
        seen.append((row.cached, row.trace_rounds, row.evicted))
        row.add_trace(1)
    return seen


@settings(deadline=None, max_examples=200)
@given(servings(), st.integers(1, 60), st.integers(0, 120))
def test_timeline_is_the_row_token_by_token(serving: Serving, prompt: int, trace: int) -> None:
    timeline = Timeline.of(serving, prompt)
    for position, (slot, rounds, evicted) in enumerate(walk(serving, prompt, prompt + trace)):
        assert timeline.slot(position) == slot
        assert timeline.rounds(position) == rounds
        assert timeline.evicted(rounds) == evicted
        assert slot < timeline.slots


@settings(deadline=None, max_examples=200)
@given(servings(), st.integers(1, 60), st.integers(1, 6))
def test_events_are_the_rows(serving: Serving, prompt: int, rounds: int) -> None:
    timeline = Timeline.of(serving, prompt)
    row = Row.new(serving.budget, serving.settings.protection)
    row.add_prompt(prompt)
    for number in range(rounds):
        while not row.needs_round():
            row.add_trace(1)
        assert timeline.due(row.seen)
        event = row.next_round()
        assert timeline.event(number) == event
        row.apply(event)
        row.add_trace(1)


@settings(deadline=None, max_examples=200)
@given(
    servings(), st.lists(st.tuples(st.integers(1, 50), st.integers(0, 90), st.integers(1, 70)), min_size=1, max_size=5)
)
def test_phases_write_every_token_once_and_run_every_round_once(
    serving: Serving, rows: list[tuple[int, int, int]]
) -> None:
    """Rows of (prompt, tokens computed before, tokens now): cut in any way, tokens land where they would one by one."""
    requests = [Tracked(serving, list(range(prompt)), 0) for prompt, _, _ in rows]
    computed = np.array([c for _, c, _ in rows])
    starts = np.concatenate([[0], np.cumsum([n for _, _, n in rows])])
    walks = [walk(serving, prompt, before + now) for prompt, before, now in rows]
    written: list[int] = []
    done = [walks[i][before - 1][1] if before else 0 for i, (_, before, _) in enumerate(rows)]
    for phase in Rows(requests).phases(starts, computed):
        tokens = np.arange(starts[-1]) if phase.tokens is None else phase.tokens
        for i in phase.due:
            row = phase.rows[i]
            done[row] += 1
            assert phase.rounds[i] == done[row]
        for i, row in enumerate(phase.rows):
            own = tokens[phase.starts[i] : phase.starts[i + 1]]
            positions = own - starts[row] + computed[row]
            assert list(phase.owners[phase.starts[i] : phase.starts[i + 1]]) == [i] * len(own)
            for token, position in zip(range(phase.starts[i], phase.starts[i + 1]), positions, strict=True):
                slot, rounds, _ = walks[row][position]
                assert phase.slots[token] == slot
                assert rounds == done[row] == phase.rounds[i]
            assert phase.lengths[i] == walks[row][positions[-1]][0] + 1
        written += list(tokens)
    assert sorted(written) == list(range(starts[-1]))
    assert done == [w[-1][1] for w in walks]


@pytest.mark.parametrize("prompt", [1, 30, 200])
def test_a_long_prompt_grows_its_budget_as_on_transformers(prompt: int) -> None:
    serving = Serving.parse({"budget": 64, "buffer": 16})
    timeline = Timeline.of(serving, prompt)
    assert timeline.kept == serving.budget.for_prompt(prompt).total
    assert timeline.grown == max(0, prompt + 32 - 64)


@settings(deadline=None, max_examples=100)
@given(servings(), st.lists(st.tuples(st.integers(1, 50), st.integers(0, 120)), min_size=1, max_size=5))
def test_single_tokens_land_where_phases_put_them(serving: Serving, rows: list[tuple[int, int]]) -> None:
    requests = [Tracked(serving, list(range(prompt)), 0) for prompt, _ in rows]
    positions = np.array([position for _, position in rows])
    slots, due = Rows(requests).single(positions)
    (phase,) = Rows(requests).phases(np.arange(len(rows) + 1), positions)
    assert slots.tolist() == phase.slots.tolist()
    assert np.flatnonzero(due).tolist() == phase.due.tolist()
