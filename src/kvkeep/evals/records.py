"""Samples on disk: one JSON line each, a batch written whole, a torn end recognised."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..report.files import write_text
from .plan import Batch


class Records:
    """An append-only file of batches.

    Opening it reads what is there. A kill can tear only the end: a last line without newline, or a last batch without
    all of its rows, is cut off and runs again. Anything else that is wrong is an error, since it was not us.

    Args:
        path: the file; made if absent.
        batches: the plan.

    Attributes:
        done: lines of each finished batch, by its number.

    Raises:
        ValueError: a line that is no JSON, or does not belong to the plan.
    """

    def __init__(self, path: Path, batches: Sequence[Batch]) -> None:
        self.path = path
        self._plan = {batch.number: batch for batch in batches}
        self.done: dict[int, list[dict[str, Any]]] = {}
        if path.exists():
            self._read()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """All lines, in the order of the plan."""
        return [line for number in sorted(self.done) for line in self.done[number]]

    @property
    def missing(self) -> list[Batch]:
        """Batches that have not run, in the order of the plan."""
        return [batch for number, batch in self._plan.items() if number not in self.done]

    def add(self, batch: Batch, lines: Sequence[Mapping[str, Any]]) -> None:
        """Append a batch: one write, on the disk before this returns.

        Raises:
            RuntimeError: the lines are not the batch's.
        """
        found = [dict(line) for line in lines]
        if [_key(line) for line in found] != batch.keys:
            raise RuntimeError(f"batch {batch.number} of {batch.cell} came back with other rows than planned")
        data = "".join(json.dumps(line, allow_nan=False) + "\n" for line in found).encode()
        with self.path.open("ab", buffering=0) as file:
            written = file.write(data)
            if written != len(data):
                raise OSError(f"{self.path}: wrote {written} of {len(data)} bytes; is the disk full?")
            os.fsync(file.fileno())
        self.done[batch.number] = found

    def sort(self) -> None:
        """Put the lines into the order of the plan: what ran first depends on the workers' speed."""
        write_text(self.path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in self.rows))

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        end = 0  # of the last finished batch
        place = 0
        pending: list[dict[str, Any]] = []
        for number, raw in enumerate(whole.splitlines(keepends=True), start=1):
            place += len(raw)
            pending.append(self._parse(raw, number))
            if pending[0]["batch"] != pending[-1]["batch"]:
                raise ValueError(f"{self.path}, line {number}: batch {pending[0]['batch']} ends before all its rows")
            if self._finish(pending, number):
                pending, end = [], place
        if end < len(data):  # a kill during a write
            os.truncate(self.path, end)

    def _parse(self, raw: bytes, number: int) -> dict[str, Any]:
        where = f"{self.path}, line {number}"
        advice = "it was not written by this run; restore the file, or start again in another --out"
        try:
            line = json.loads(raw)
        except ValueError as error:
            raise ValueError(f"{where} is not JSON ({error}): {advice}") from error
        if not isinstance(line, dict) or line.get("batch") not in self._plan:
            raise ValueError(f"{where} names no batch of the plan: {advice}")
        if line.get("cell") != self._plan[line["batch"]].cell or _key(line) not in self._plan[line["batch"]].keys:
            raise ValueError(f"{where} is not a row of batch {line['batch']}: {advice}")
        if line["batch"] in self.done:
            raise ValueError(f"{where} repeats batch {line['batch']}: {advice}")
        return line

    def _finish(self, pending: list[dict[str, Any]], number: int) -> bool:
        batch = self._plan[pending[0]["batch"]]
        if len(pending) < len(batch.keys):
            return False
        if [_key(line) for line in pending] != batch.keys:
            raise ValueError(f"{self.path}, line {number}: the rows of batch {batch.number} are not those planned")
        self.done[batch.number] = pending
        return True


def _key(line: Mapping[str, Any]) -> tuple[Any, Any]:
    return line.get("problem"), line.get("run")
