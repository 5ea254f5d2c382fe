"""Prepare a comparison, run what is missing, and sum it up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ..report.files import write_text
from . import pool
from .cells import Cell, ItemSet, make_cells, make_sets
from .config import Config
from .environment import threads_each
from .models import Model, find_model
from .plan import Batch, make_batches, make_checks
from .pool import BatchFailed
from .records import Records
from .worker import Setup


@dataclass(frozen=True)
class Prepared:
    """A comparison before its first batch: everything follows from the configuration."""

    config: Config
    models: list[Model]
    sets: list[ItemSet]
    cells: list[Cell]
    batches: list[Batch]
    checks: list[Batch]

    def to_dict(self) -> dict[str, Any]:
        """What ``config.json`` holds: the configuration and what it led to."""
        digests = {f"{s.model} | {s.task}": {"length": s.length, "digest": s.digest} for s in self.sets}
        return {**self.config.to_dict(), "problem_sets": digests, "cells": [cell.to_dict() for cell in self.cells]}


@dataclass(frozen=True)
class Run:
    """A comparison whose batches are all there."""

    prepared: Prepared
    samples: list[dict[str, Any]]
    checks: list[dict[str, Any]]
    mixed: bool


class Interrupted(RuntimeError):
    """Ctrl-C; the folder can be resumed."""


def prepare(config: Config) -> Prepared:
    """Find models, make problems, cells and the plan; nothing runs.

    Raises:
        ValueError: a model, task or budget does not work; nothing has been written.
    """
    models = [find_model(name) for name in config.models]
    for i, model in enumerate(models):
        if same := [other.name for other in models[:i] if other.identity == model.identity]:
            raise ValueError(f"{same[0]} and {model.name} are one model: leave one of them out")
    sets = make_sets(config, models)
    cells = make_cells(config, sets)
    batches = make_batches(config, cells, sets)
    return Prepared(config, models, sets, cells, batches, make_checks(config, cells, batches))


def execute(
    prepared: Prepared, folder: Path, *, workers: int = 2, allow_mixed: bool = False, console: Console | None = None
) -> Run:
    """Run the batches that the folder lacks.

    Args:
        prepared: the comparison.
        folder: where results are, or go.
        workers: processes; 0 runs in this one.
        allow_mixed: go on although versions, code or threads differ from those the folder was begun with.
        console: where the progress bar goes.

    Raises:
        ValueError: the folder is another comparison's, or damaged.
        BatchFailed: a batch raised; what is finished stays.
        Interrupted: Ctrl-C.
    """
    from .folder import claim, join, locked

    config = prepared.config
    threads = threads_each(workers) if workers else torch.get_num_threads()
    with locked(folder):
        claim(folder, prepared)
        samples = Records(folder / "samples.jsonl", prepared.batches)
        checks = Records(folder / "checks.jsonl", prepared.checks)
        todo = bool(samples.missing or checks.missing)
        mixed = join(folder, prepared, threads, allow_mixed, todo)
        if not todo:
            (console or Console(stderr=True)).print(f"{folder} is complete: nothing was run again", highlight=False)
        setup = Setup(config.backend, config.problems, config.seed, threads if workers else None, config.texts)
        try:
            if todo:
                _run(prepared, samples, checks, setup, workers, console or Console(stderr=True))
        except BatchFailed as error:
            if not error.details:
                raise
            write_text(folder / "failure.log", error.details)
            raise BatchFailed(f"{error} (traceback: {folder / 'failure.log'})", error.details) from None
        except KeyboardInterrupt as error:
            done = len(samples.done) + len(checks.done)
            total = len(prepared.batches) + len(prepared.checks)
            raise Interrupted(
                f"stopped: {done} of {total} batches are in {folder}; the same command goes on from there"
            ) from error
        samples.sort()
        checks.sort()
        return Run(prepared, samples.rows, checks.rows, mixed)


def _run(prepared: Prepared, samples: Records, checks: Records, setup: Setup, workers: int, console: Console) -> None:
    cells = {cell.id: cell for cell in prepared.cells}
    todo = [*samples.missing, *checks.missing]
    first_check = len(prepared.batches)
    with _Bars(console, prepared, samples, checks) as bars:
        for batch, lines in pool.results(todo, cells, setup, workers):
            (samples if batch.number < first_check else checks).add(batch, lines)
            bars.advance(batch, sum(line["tokens"] for line in lines))


class _Bars:
    """One bar for all samples; says which cell was last, how many are complete, and tokens a second."""

    def __init__(self, console: Console, prepared: Prepared, samples: Records, checks: Records) -> None:
        every = [*prepared.batches, *prepared.checks]
        self._left = {cell.id: 0 for cell in prepared.cells}
        missing = {batch.number for batch in [*samples.missing, *checks.missing]}
        for batch in every:
            self._left[batch.cell] += batch.number in missing
        done = sum(len(b.problems) for b in every if b.number not in missing)
        self._tokens = 0
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("samples"),
            TextColumn("{task.fields[rate]}"), TimeRemainingColumn(), console=console,
        )  # fmt: skip
        total = sum(len(batch.problems) for batch in every)
        self._bar: TaskID = self._progress.add_task(self._text(), total=total, completed=done, rate="")

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def advance(self, batch: Batch, tokens: int) -> None:
        self._left[batch.cell] -= 1
        self._tokens += tokens
        elapsed = self._progress.tasks[0].elapsed or 0.0
        rate = f"{self._tokens / elapsed:,.0f} tokens/s" if elapsed else ""
        self._progress.update(self._bar, advance=len(batch.problems), description=self._text(), rate=rate)

    def _text(self) -> str:
        complete = sum(left == 0 for left in self._left.values())
        return f"{complete} of {len(self._left)} cells"


def expected_tokens(batches: Sequence[Batch]) -> int:
    """Tokens of a plan, prompts included."""
    return sum(batch.tokens for batch in batches)
