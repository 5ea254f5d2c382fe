"""The samples file: what a kill can do to it is mended, everything else is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvkeep.evals.plan import Batch
from kvkeep.evals.records import Records

PLAN = [Batch(0, "a", ("p", "q"), (0, 0), 10), Batch(1, "b", ("p", "q"), (0, 1), 10), Batch(2, "b", ("r",), (0,), 5)]


def lines(batch: Batch) -> list[dict[str, Any]]:
    return [{"cell": batch.cell, "batch": batch.number, "problem": p, "run": r, "score": 1.0} for p, r in batch.keys]


def written(path: Path, *numbers: int) -> bytes:
    records = Records(path, PLAN)
    for number in numbers:
        records.add(PLAN[number], lines(PLAN[number]))
    return path.read_bytes()


def test_what_was_added_is_there_again(tmp_path: Path) -> None:
    written(tmp_path / "s", 1, 0)
    again = Records(tmp_path / "s", PLAN)
    assert again.missing == [PLAN[2]]
    assert again.rows == lines(PLAN[0]) + lines(PLAN[1])


def test_a_kill_can_tear_the_end_anywhere(tmp_path: Path) -> None:
    file = tmp_path / "s"
    whole = written(file, 1, 0, 2)
    ends = [len(written(tmp_path / f"{i}", *(1, 0, 2)[:i])) for i in (1, 2)]
    for cut in range(1, len(whole)):
        file.write_bytes(whole[:cut])
        again = Records(file, PLAN)
        kept = max([0, *(end for end in ends if end <= cut)])
        assert file.read_bytes() == whole[:kept]
        for batch in again.missing:
            again.add(batch, lines(batch))
        again.sort()
        assert Records(file, PLAN).rows == [line for batch in PLAN for line in lines(batch)]


def test_the_order_on_disk_is_the_plans_after_sorting(tmp_path: Path) -> None:
    written(tmp_path / "s", 2, 1, 0)
    records = Records(tmp_path / "s", PLAN)
    records.sort()
    assert [json.loads(line)["batch"] for line in (tmp_path / "s").read_text().splitlines()] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda text: text.replace('{"cell": "a"', '{"cell" "a"', 1), "line 1 is not JSON"),
        (lambda text: "[]\n" + text, "line 1 names no batch of the plan"),
        (lambda text: text.replace('"batch": 1', '"batch": 7', 1), "line 3 names no batch of the plan"),
        (lambda text: text.replace('"cell": "b"', '"cell": "c"', 1), "line 3 is not a row of batch 1"),
        (lambda text: text.replace('"problem": "q"', '"problem": "x"', 1), "line 2 is not a row of batch 0"),
        (lambda text: text + text, "line 5 repeats batch 0"),
        (lambda text: "".join(text.splitlines(keepends=True)[1:]), "line 2: batch 0 ends before all its rows"),
        (lambda text: "".join(text.splitlines(keepends=True)[i] for i in (1, 0, 2, 3)), "are not those planned"),
    ],
)
def test_anything_else_is_an_error_and_nothing_is_cut(tmp_path: Path, spoil: Any, says: str) -> None:
    file = tmp_path / "s"
    written(file, 0, 1)
    text = spoil(file.read_text())
    file.write_text(text)
    with pytest.raises(ValueError, match=says):
        Records(file, PLAN)
    assert file.read_text() == text


def test_a_batch_must_bring_the_planned_rows(tmp_path: Path) -> None:
    records = Records(tmp_path / "s", PLAN)
    with pytest.raises(RuntimeError, match="other rows than planned"):
        records.add(PLAN[0], lines(PLAN[0])[:1])
    with pytest.raises(ValueError):  # NaN is no JSON
        records.add(PLAN[2], [{**lines(PLAN[2])[0], "score": float("nan")}])
    assert not (tmp_path / "s").exists()
