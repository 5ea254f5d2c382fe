"""Arms against arms, paired by problem."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from . import stats
from .cells import Cell
from .config import Config
from .tasks import make_task

#: Rules that cost next to nothing: what a cleverer one must beat.
TRIVIAL = ("random", "streaming", "recency", "knorm")
#: Family-wise level of the declared comparisons.
ALPHA = 0.05
Scores = Mapping[str, list[float]]


@dataclass(frozen=True)
class Pair:
    """Two cells of one model and task."""

    a: Cell
    b: Cell

    @property
    def id(self) -> str:
        """Names the comparison."""
        return f"{self.a.id} vs {self.b.arm}"


class Pairs:
    """Finds and compares pairs of cells; each pair is computed once.

    Args:
        config: the comparison.
        cells: its cells.
        scores: of each cell by id: scores of each problem, one a run.
    """

    def __init__(self, config: Config, cells: Iterable[Cell], scores: Mapping[str, Scores]) -> None:
        self.config, self.cells, self.scores = config, list(cells), scores
        self.arms = {arm.label: arm for arm in config.arms}
        self._bounds = {text: make_task(text).bounds for text in config.tasks}
        self._upward = {text: make_task(text).higher_is_better for text in config.tasks}
        self._made: dict[str, stats.Comparison] = {}
        self._declared = {frozenset((pair.a.id, pair.b.id)) for pair in declared_pairs(config, self.cells)}

    def compare(self, pair: Pair) -> stats.Comparison:
        """a minus b."""
        if pair.id not in self._made:
            a, b = self.scores[pair.a.id], self.scores[pair.b.id]
            self._made[pair.id] = stats.compare(a, b, bounds=self._bounds[pair.a.task])
        return self._made[pair.id]

    def partner(self, cell: Cell, label: str) -> Cell | None:
        """The cell of another arm at the same budget; an arm that never evicts has one cell for all budgets."""
        for other in self.cells:
            if (other.model, other.task, other.arm) == (cell.model, cell.task, label) and (
                other.budget is None or other.level == cell.level
            ):
                return other
        return None

    def full(self, cell: Cell) -> Cell | None:
        """The full cache's cell beside an evicting one."""
        labels = [label for label, arm in self.arms.items() if not arm.evicts]
        found = self.partner(cell, labels[0]) if labels else None
        return None if cell.budget is None else found

    def upward(self, cell: Cell) -> bool:
        """Whether a larger score is a better one."""
        return self._upward[cell.task]

    def declared(self, a: Cell, b: Cell) -> bool:
        """Whether the comparison of two cells, either way round, was declared before the run."""
        return frozenset((a.id, b.id)) in self._declared

    def best_trivial(self, cell: Cell) -> Cell | None:
        """The best of the trivial policies with the same protection at the same budget; None if that is the cell.

        Which is best is read off the same samples, so a difference to it is biased towards 0 or below.
        """
        protect = self.arms[cell.arm].protect
        labels = [
            label
            for label, arm in self.arms.items()
            if arm.policy in TRIVIAL and not arm.options and arm.protect == protect
        ]
        found = [other for label in labels if (other := self.partner(cell, label)) is not None]
        if cell.budget is None or not found:
            return None
        sign = 1 if self._upward[cell.task] else -1
        best = max(found, key=lambda other: sign * mean_score(self.scores[other.id]))
        return None if best is cell else best


def declared_pairs(config: Config, cells: Iterable[Cell]) -> list[Pair]:
    """The primary comparisons: each over all models, tasks and (unless one was named) budgets."""
    cells = list(cells)
    return [
        Pair(a, b)
        for primary in config.primary
        for a in cells
        for b in cells
        if (a.arm, b.arm) == (primary.a, primary.b)
        and (a.model, a.task) == (b.model, b.task)
        and (a.budget is None or b.budget is None or a.level == b.level)  # a full cache stands beside every budget
        and primary.level in (None, (a if a.budget is not None else b).level)
    ]


def adjusted(pairs: Pairs) -> list[tuple[Pair, float]]:
    """The declared comparisons with their p-values after Holm's correction over all of them."""
    declared = declared_pairs(pairs.config, pairs.cells)
    family = stats.holm({pair.id: pairs.compare(pair).p_sign for pair in declared}) if declared else {}
    return [(pair, family[pair.id]) for pair in declared]


def finite(end: float) -> float | None:
    """An end of an interval for JSON; None where nothing limits it."""
    return end if isfinite(end) else None


def mean_score(scores: Scores) -> float:
    """Mean over problems of the mean over runs."""
    means = [sum(runs) / len(runs) for _, runs in sorted(scores.items())]
    return sum(means) / len(means)


def comparisons(pairs: Pairs) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The declared comparisons, with Holm's correction over all of them, and the exploratory ones."""
    declared = adjusted(pairs)
    family = {pair.id for pair, _ in declared}
    primary = [{**_row(pairs, pair, "primary"), "p_holm": p} for pair, p in declared]
    others: dict[str, dict[str, Any]] = {}
    for cell in pairs.cells:
        for kind, other in (("full", pairs.full(cell)), ("best trivial", pairs.best_trivial(cell))):
            if other is not None:
                pair = Pair(cell, other)
                if pair.id not in family:
                    others.setdefault(pair.id, _row(pairs, pair, kind))
    return primary, list(others.values())


def _row(pairs: Pairs, pair: Pair, kind: str) -> dict[str, Any]:
    found = pairs.compare(pair)
    cell = pair.a if pair.a.budget is not None else pair.b
    return {
        "model": cell.model,
        "task": cell.task,
        "a": pair.a.arm,
        "b": pair.b.arm,
        "compression": cell.compression,
        "budget": cell.budget,
        "kind": kind,
        "exploratory": kind != "primary",
        "difference": found.difference.estimate,
        "low": finite(found.difference.low),
        "high": finite(found.difference.high),
        "method": found.difference.method,
        "wins": found.wins,
        "losses": found.losses,
        "ties": found.ties,
        "p_sign": found.p_sign,
        "n": found.n,
    }
