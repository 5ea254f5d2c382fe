"""Run a batch: the part of a comparison that touches a model."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .cells import Cell
from .engines import Backend, Loaded
from .plan import Batch
from .task import Item, Outcome, Task
from .tasks import make_task

#: What an engine must report of every sample; nothing is guessed where it does not.
REQUIRED = ("rounds", "evicted", "mean_entries", "peak_entries", "mean_bytes", "peak_bytes")


@dataclass(frozen=True)
class Setup:
    """What all batches of a run share; travels to the worker processes."""

    backend: Backend
    problems: int
    seed: int
    threads: int | None  # None: leave torch's setting alone
    texts: bool = False


class Worker:
    """Runs batches one after the other; keeps the last model loaded."""

    def __init__(self, setup: Setup) -> None:
        import torch

        if setup.threads is not None:
            torch.set_num_threads(setup.threads)
        self.setup = setup
        self._name = ""
        self._loaded: Loaded | None = None
        self._items: dict[str, dict[str, Item]] = {}
        self._tasks: dict[str, Task] = {}

    def run(self, batch: Batch, cell: Cell) -> list[dict[str, Any]]:
        """One line a row; see README for the fields.

        Raises:
            RuntimeError: the task or engine broke a promise (rows, stats, finite scores, budget).
        """
        loaded = self._model(cell.model)
        task, items = self._problems(cell.task, loaded)
        rows = [items[name] for name in batch.problems]
        engine = loaded.engine(cell.settings)
        started = time.perf_counter()
        outcomes = task.run(engine, rows, batch.samples, self.setup.seed)
        seconds = (time.perf_counter() - started) / len(rows)
        if len(outcomes) != len(rows):
            raise RuntimeError(f"{cell.task} gave {len(outcomes)} outcomes for {len(rows)} problems")
        return [
            self._line(batch, cell, item, run, outcome, seconds)
            for item, run, outcome in zip(rows, batch.samples, outcomes, strict=True)
        ]

    def _model(self, name: str) -> Loaded:
        if self._loaded is None or self._name != name:
            self._loaded = None  # one model in memory at a time
            self._items.clear()
            self._loaded, self._name = self.setup.backend.load(name), name
        return self._loaded

    def _problems(self, text: str, loaded: Loaded) -> tuple[Task, dict[str, Item]]:
        if text not in self._items:
            task = self._tasks.setdefault(text, make_task(text))
            items = task.items(loaded.tokenizer, self.setup.problems, self.setup.seed)
            self._items[text] = {item.id: item for item in items}
        return self._tasks[text], self._items[text]

    def _line(self, batch: Batch, cell: Cell, item: Item, run: int, outcome: Outcome, seconds: float) -> dict[str, Any]:
        where = f"problem {item.id}, run {run}"
        if absent := [key for key in REQUIRED if key not in outcome.stats]:
            raise RuntimeError(f"{where}: the engine did not report {', '.join(absent)}")
        numbers = {"score": outcome.score, **outcome.metrics}
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise RuntimeError(f"{where}: {name} is {value}; a sample without a score is an error, not a hole")
        _check_budget(cell, item, outcome.stats, where)
        line: dict[str, Any] = {
            "cell": cell.id,
            "batch": batch.number,
            "problem": item.id,
            "run": run,
            "score": float(outcome.score),
            "answered": bool(outcome.answered),
            "truncated": bool(outcome.truncated),
            "prompt_tokens": len(item.prompt),
            "tokens": outcome.tokens,
            **{key: outcome.stats[key] for key in REQUIRED},
            "metrics": {name: float(value) for name, value in outcome.metrics.items()},
            "digest": hashlib.sha256(outcome.text.encode()).hexdigest()[:16] if outcome.text else "",
            "seconds": seconds,
        }
        return {**line, "text": outcome.text} if self.setup.texts else line


def _check_budget(cell: Cell, item: Item, stats: Mapping[str, Any], where: str) -> None:
    """More entries than K + r would make the comparison unfair, so it fails the run."""
    budget = cell.settings.make_budget()
    if budget is None or budget.scope != "total" or budget.growth is not None:
        return
    most = max(budget.total + budget.every, len(item.prompt))  # an unprotected long prompt is held until round 0
    if stats["peak_entries"] > most:
        raise RuntimeError(f"{where}: {stats['peak_entries']} entries a head are more than K + r = {most}")
