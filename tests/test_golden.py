"""Kept positions for fixed seeds, stored: a change of the draws, ranks or layout must not go unnoticed.

Both engines, every replay after a preemption and every stored result rely on them. If a change is
meant (and recorded in docs/decisions.md), write the table again with

    python tests/test_golden.py --write
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvkeep.draws import stream_of
from kvkeep.settings import Settings
from reference import Slots

TABLE = Path(__file__).parent / "golden" / "kept_sets.json"
ROUNDS = (1, 3, 10)
PROMPT = [101, 7, 7, 42, 9]  # P = 5
CASES: dict[str, Settings] = {
    "head": Settings.of("random", budget=16, buffer=4),
    "head, seed 1": Settings.of("random", budget=16, buffer=4, seed=1),
    "head, seed 2**40 + 3": Settings.of("random", budget=16, buffer=4, seed=2**40 + 3),
    "head, window 2": Settings.of("random", budget=16, buffer=4, window=2),
    "head, growth 2": Settings.of("random", budget=16, buffer=4, growth=2),
    "layer": Settings.of("random", budget=16, buffer=4, draw="layer"),
    "model": Settings.of("random", budget=16, buffer=4, draw="model"),
    "groups 1": Settings.of("random", budget=16, buffer=4, groups=1),
    "unit 2": Settings.of("random", budget=16, buffer=4, unit=2),
    "trace, align 8": Settings.of("random", budget=16, buffer=4, scope="trace", align=8),
    "recency": Settings.of("recency", budget=16, buffer=4),
    "streaming": Settings.of("streaming", budget=16, buffer=4),
}
Kept = dict[str, list[list[list[int]]]]  # when -> [layer][head] -> positions, ascending


def slots_of(settings: Settings, sample: int = 0) -> Slots:
    return Slots(
        settings.make_policy(),
        settings.make_budget(),
        settings.protection,
        [len(PROMPT)],
        [stream_of(PROMPT, sample)],
        L=2,
        H=2,
        seed=settings.seed,
    )


def kept_sets(settings: Settings) -> Kept:
    """After 1, 3 and 10 rounds."""
    slots, kept = slots_of(settings), Kept()
    for number in ROUNDS:
        slots.rounds(number - slots.rows[0].trace_rounds)
        kept[f"round {number}"] = slots.kept().sort(dim=-1).values.tolist()
    return kept


def kept_after_a_turn() -> Kept:
    """Three rounds, two more tokens, a turn of 3, and two rounds more; sample 1 of the same prompt."""
    slots, kept = slots_of(CASES["head"], sample=1), Kept()
    slots.rounds(3)
    slots.trace(2)
    slots.turn({0: 3})
    kept["turn"] = slots.kept().sort(dim=-1).values.tolist()
    slots.rounds(2)
    kept["round 5"] = slots.kept().sort(dim=-1).values.tolist()
    return kept


def table() -> dict[str, Kept]:
    return {name: kept_sets(settings) for name, settings in CASES.items()} | {"second turn": kept_after_a_turn()}


@pytest.mark.parametrize("name", [*CASES, "second turn"])
def test_kept_sets_are_the_stored_ones(name: str) -> None:
    stored = json.loads(TABLE.read_text())[name]
    assert (kept_sets(CASES[name]) if name in CASES else kept_after_a_turn()) == stored


def test_the_table_is_complete() -> None:
    """A case renamed here would otherwise leave its old row behind, unread."""
    assert list(json.loads(TABLE.read_text())) == [*CASES, "second turn"]


def as_text(rows: dict[str, Kept]) -> str:
    """JSON with one line for each point in time, so that a diff can be read."""
    cases = []
    for name, kept in rows.items():
        lines = [f"    {json.dumps(when)}: {json.dumps(positions)}" for when, positions in kept.items()]
        cases.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(cases) + "\n}\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(f"usage: {sys.argv[0]} --write")
    TABLE.write_text(as_text(table()))
    print(f"wrote {len(CASES) + 1} cases to {TABLE}")
