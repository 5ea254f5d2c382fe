"""Statistics of scores on problems: intervals, paired comparisons, sign test, Holm.

The unit is the problem. Repeated runs of a problem are averaged first, and only problems are resampled,
so an interval speaks of problems like these, not of more runs on the same ones.

The intervals are made in :mod:`kvkeep.evals.intervals`, their coverage is measured in
:mod:`kvkeep.evals.coverage`, plans are made in :mod:`kvkeep.evals.power`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, isfinite

import numpy as np
from scipy import stats

from .coverage import coverage
from .intervals import RESAMPLES, Bounds, Kind, interval_bounds
from .power import power_of, problems_needed

__all__ = [
    "Comparison",
    "Interval",
    "Scores",
    "compare",
    "coverage",
    "holm",
    "mean_interval",
    "per_problem",
    "power_of",
    "problems_needed",
    "sign_test",
]

Scores = Mapping[str, Sequence[float]]
"""Problem id -> the score of each run (0/1, or any finite number)."""


@dataclass(frozen=True)
class Interval:
    """An estimate over problems with its confidence interval.

    Attributes:
        estimate: the plain mean over problems, in the unit of the scores.
        low: lower end; ``-inf`` where scores without bounds do not limit it.
        high: upper end; ``inf`` likewise.
        level: nominal coverage, such as 0.95.
        method: how the interval was made, in words for a table's footnote.
        n: number of problems.
    """

    estimate: float
    low: float
    high: float
    level: float
    method: str
    n: int


@dataclass(frozen=True)
class Comparison:
    """A paired comparison a - b.

    Attributes:
        difference: mean over problems of a's score minus b's.
        wins: problems on which a's mean score is higher.
        losses: problems on which it is lower.
        ties: problems on which the two are equal.
        p_sign: two-sided p-value of the exact sign test on wins and losses.
        n: number of problems.
    """

    difference: Interval
    wins: int
    losses: int
    ties: int
    p_sign: float
    n: int


def per_problem(scores: Scores) -> dict[str, float]:
    """The mean score of each problem, sorted by problem id.

    Raises:
        ValueError: no problem, a problem without runs, unequal numbers of runs, or a score that is not finite.
    """
    if not scores:
        raise ValueError("no scores: there is not one problem to average over")
    runs = {problem: len(values) for problem, values in scores.items()}
    if len(set(runs.values())) > 1 or 0 in runs.values():
        usual = max(1, max(runs.values(), key=list(runs.values()).count))
        odd = [f"{problem} ({count})" for problem, count in sorted(runs.items()) if count != usual]
        raise ValueError(f"every problem needs the same number of runs ({usual} for most), but not so: {_some(odd)}")
    bad = [problem for problem in sorted(scores) if not all(isfinite(value) for value in scores[problem])]
    if bad:
        raise ValueError(f"scores must be finite numbers, but NaN or infinite for: {_some(bad)}")
    # fsum rounds once, so that the same runs in another order are an exact tie.
    return {problem: fsum(scores[problem]) / runs[problem] for problem in sorted(scores)}


def mean_interval(
    scores: Scores,
    *,
    bounds: Bounds = (0.0, 1.0),
    level: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """The mean score over problems, with its interval.

    Args:
        scores: runs of each problem; averaged first.
        bounds: least and greatest possible score. None for a metric without them; if all problems then score
            the same, nothing limits the mean and the interval is infinite.
        level: nominal coverage.
        seed: of the resamples. The result depends on nothing else, least of all on the order of problems.
        resamples: bootstrap resamples.

    Raises:
        ValueError: fewer than 2 problems, scores outside the bounds, or scores that :func:`per_problem` refuses.
    """
    means = per_problem(scores)
    _check_bounds(scores, bounds)
    return _interval(list(means.values()), "mean", bounds, level, seed, resamples)


def compare(
    a: Scores,
    b: Scores,
    *,
    bounds: Bounds = (0.0, 1.0),
    level: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Comparison:
    """a - b, paired by problem. For the arguments see :func:`mean_interval`; ``bounds`` are those of a score.

    Raises:
        ValueError: the two do not hold the same problems with the same number of runs (a missing cell is never
            dropped), fewer than 2 problems, scores outside the bounds, or not finite.
    """
    mean_a, mean_b = per_problem(a), per_problem(b)
    if mean_a.keys() != mean_b.keys():
        parts = {
            "the first": sorted(mean_b.keys() - mean_a.keys()),
            "the second": sorted(mean_a.keys() - mean_b.keys()),
        }
        lacks = "; ".join(f"{side} lacks {_some(missing)}" for side, missing in parts.items() if missing)
        raise ValueError(f"a paired comparison needs the same problems on both sides: {lacks}")
    runs_a, runs_b = (len(next(iter(scores.values()))) for scores in (a, b))
    if runs_a != runs_b:
        raise ValueError(f"both sides need the same number of runs per problem, got {runs_a} and {runs_b}")
    _check_bounds(a, bounds)
    _check_bounds(b, bounds)
    differences = [mean_a[problem] - mean_b[problem] for problem in mean_a]
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    interval = _interval(differences, "difference", bounds, level, seed, resamples)
    n = len(differences)
    return Comparison(interval, wins, losses, n - wins - losses, sign_test(wins, losses), n)


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p-value of the exact sign test: binomial with p = 1/2 over the problems that are no ties.

    With one run per problem this is McNemar's exact test. 1.0 if there are only ties.

    Raises:
        ValueError: a negative count.
    """
    if wins < 0 or losses < 0:
        raise ValueError(f"wins and losses must not be negative, got {wins} and {losses}")
    if wins + losses == 0:
        return 1.0
    return float(stats.binomtest(wins, wins + losses, 0.5).pvalue)


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values over a declared family, in the order given.

    A comparison is significant at family-wise level alpha where its adjusted value is at most alpha.

    Raises:
        ValueError: a p-value outside [0, 1].
    """
    bad = [name for name, value in p.items() if not 0 <= value <= 1]
    if bad:
        raise ValueError(f"p-values must lie in [0, 1], but not so: {_some(bad)}")
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p, key=lambda name: p[name])):
        largest = max(largest, min(1.0, (len(p) - rank) * p[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p}


def _interval(values: Sequence[float], kind: Kind, bounds: Bounds, level: float, seed: int, resamples: int) -> Interval:
    low, high = interval_bounds(np.array([values]), kind, bounds, level=level, seed=seed, resamples=resamples)
    method = "bootstrap-t over problems" + (", pseudo-problems at the bounds" if bounds else "")
    return Interval(fsum(values) / len(values), float(low[0]), float(high[0]), level, method, len(values))


def _check_bounds(scores: Scores, bounds: Bounds) -> None:
    if bounds is None:
        return
    low, high = bounds
    if not low < high:
        raise ValueError(f"bounds must be (least, greatest), got {bounds}")
    outside = [problem for problem in sorted(scores) if not all(low <= score <= high for score in scores[problem])]
    if outside:
        raise ValueError(f"scores outside the bounds [{low:g}, {high:g}] for: {_some(outside)}; pass their bounds")


def _some(names: Sequence[str], most: int = 10) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
