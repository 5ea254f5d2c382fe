"""Confidence intervals of many samples at once.

**The interval** is a studentised bootstrap over problems. The plain percentile bootstrap undercovers at
the numbers of problems people use, and has no width at all where every problem was solved or tied. Three
things mend that (:func:`interval_bounds`); :mod:`kvkeep.evals.coverage` measures what it amounts to:

* Scores with bounds get *pseudo-problems*, which are resampled like the others: two at each end for a
  mean (Agresti and Coull), one of each sign for a paired difference (Bonett and Price). They shrink with
  the spread of the scores, so graded scores do not pay for the ends of the range.
* The critical value is the bootstrap's quantile of |t|, and never below Student's.
* Scores without bounds (KL) have no pseudo-problems; their long tails get a critical value for each side.

Measured (``pytest tests/test_stats_coverage.py -s``): 0.93 to 0.97 from 200 problems on, and above that only where few
problems differ. At 30 problems it is 0.94 to 0.98, above that where few differ, and below in two cases: a
bounded difference that a few problems in a hundred carry, all to one side (0.88), and scores without bounds
with tails like a lognormal's (0.92 with sigma 1; 0.88 for the mean with ``coverage(30, kind="mean",
metric="unbounded", sigma=1.5)``). A sample that small rarely holds what matters there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Bounds = tuple[float, float] | None
"""Least and greatest possible score; None where there is none."""

Floats = NDArray[np.float64]
Kind = Literal["mean", "difference"]
Method = Literal["bootstrap-t", "percentile"]

RESAMPLES = 1999
"""Resamples of an interval: (RESAMPLES + 1) * level is a whole number for the usual levels."""

PSEUDO_SPREAD = 0.75
"""Squared size of a difference's pseudo-problems, relative to the differences that were seen. Bonett and Price
have 1, which covers a little too much where many problems differ (0.972 on average at 30 problems, 0.967 with
0.75); with 0.5 the worst scenario at 60 problems falls from 0.936 to 0.927."""

PSEUDO_PRIOR = 0.25
"""Weight, in problems, of the possibility that a difference is as large as the bounds allow."""


def interval_bounds(
    samples: Floats,
    kind: Kind,
    bounds: Bounds,
    *,
    level: float = 0.95,
    seed: int = 0,
    resamples: int = RESAMPLES,
    method: Method = "bootstrap-t",
) -> tuple[Floats, Floats]:
    """Lower and upper ends of the intervals of many samples at once; what is printed and what is simulated.

    Args:
        samples: [S, n], S samples of n problems each: mean scores, or paired differences of them.
        kind: which of the two; it decides the pseudo-problems.
        bounds: of a score (a difference then lies within plus and minus their distance).
        level: nominal coverage.
        seed: of the resamples, which all S samples share.
        resamples: their number.
        method: ``percentile`` is the plain percentile bootstrap, here to be measured against.

    Returns:
        Two arrays [S].

    Raises:
        ValueError: fewer than 2 problems, or a level outside (0, 1), or too high for the number of resamples.
    """
    if samples.shape[1] < 2:
        raise ValueError("an interval needs at least 2 problems: one says nothing about how problems differ")
    if not 0 < level < 1 or (resamples + 1) * (1 - level) < 2:
        raise ValueError(f"level must lie in (0, 1), and (resamples + 1) (1 - level) be at least 2, got {level}")
    real = np.sort(samples.astype(np.float64), axis=1)  # sorted: resamples must not depend on the order of problems
    pseudo = _pseudo(real, kind, bounds) if method == "bootstrap-t" and bounds else real[:, :0]
    values = np.sort(np.hstack([real, pseudo]), axis=1)
    counts = _counts(values.shape[1], seed, resamples)
    if method == "percentile":
        low, high = np.quantile(counts @ values.T / values.shape[1], [(1 - level) / 2, (1 + level) / 2], axis=0)
        return low, high
    mean, error, t = _studentised(values, counts, floor=0.5 if bounds else 0.0)
    below, above = _critical(t, values.shape[1], level, sides=bounds is None)
    with np.errstate(invalid="ignore"):
        low, high = mean - below * error, mean + above * error
    if bounds is None:
        constant = real[:, 0] == real[:, -1]
        return np.where(constant, -np.inf, low), np.where(constant, np.inf, high)
    least, most = bounds if kind == "mean" else (bounds[0] - bounds[1], bounds[1] - bounds[0])
    plain = real.mean(axis=1)  # the pseudo-problems move the centre; the interval still contains the estimate
    return np.clip(np.minimum(low, plain), least, most), np.clip(np.maximum(high, plain), least, most)


def _pseudo(real: Floats, kind: Kind, bounds: tuple[float, float]) -> Floats:
    """Pseudo-problems [S, 2] of differences or [S, 4] of means, in the scores' unit, for samples [S, n]."""
    low, high = bounds
    n = real.shape[1]
    if kind == "difference":
        d = real / (high - low)
        squares, fourths = (d**2).sum(axis=1), (d**4).sum(axis=1)
        # How many problems differ: their number for 0/1 scores, and not inflated by many tiny differences.
        differing = np.divide(squares**2, fourths, out=np.zeros_like(squares), where=fourths > 0)
        size = np.sqrt(PSEUDO_SPREAD * (PSEUDO_PRIOR + squares) / (PSEUDO_PRIOR + differing)) * (high - low)
        return np.stack([-size, size], axis=1)
    y = (real - low) / (high - low)
    mean = y.mean(axis=1)
    shrunk = (n * mean + 1) / (n + 2)
    prior = shrunk * (1 - shrunk)  # one problem's worth of the largest variance, so that no spread is not no doubt
    largest = n * mean * (1 - mean)
    ratio = np.minimum((((y - mean[:, None]) ** 2).sum(axis=1) + prior) / (largest + prior), 1.0)
    # Two values with the mean and the variance of `ratio` problems split between the ends: the ends themselves
    # for 0/1 scores, closer to the mean for graded ones.
    centre = mean + ratio * (0.5 - mean)
    offset = (0.5 - mean) ** 2
    half = np.sqrt(np.maximum(ratio * (offset + 0.25) - ratio**2 * offset, 0.0))
    ends = np.stack([centre - half, centre + half], axis=1) * (high - low) + low
    return np.hstack([ends, ends])


@lru_cache(maxsize=4)
def _counts(n: int, seed: int, resamples: int) -> Floats:
    """How often each of n problems is in each resample, [resamples, n]."""
    drawn = np.random.default_rng((seed, n)).integers(n, size=(resamples, n))
    drawn += np.arange(resamples)[:, None] * n
    counts = np.bincount(drawn.ravel(), minlength=resamples * n).reshape(resamples, n).astype(np.float64)
    counts.flags.writeable = False  # shared by every later call
    return counts


def _studentised(values: Floats, counts: Floats, floor: float) -> tuple[Floats, Floats, Floats]:
    """Mean [S] and standard error [S] of samples [S, N], and t [resamples, S] of their resamples.

    Args:
        values: samples [S, N].
        counts: resamples [resamples, N].
        floor: least variance of a resample relative to its sample's. A resample without the rare problems has
            next to none, and would make the interval of a nearly constant sample absurdly wide.
    """
    n = values.shape[1]
    mean = values.mean(axis=1)
    centred = (values - mean[:, None]).T
    variance = (centred**2).mean(axis=0)
    shift = counts @ centred / n
    spread = np.maximum(counts @ centred**2 / n - shift**2, floor * variance)
    spread[spread <= 1e-9 * variance] = 0.0  # one problem over and over, up to rounding
    with np.errstate(invalid="ignore", divide="ignore"):
        t = shift * np.sqrt(n - 1) / np.sqrt(spread)
    return mean, np.sqrt(variance / (n - 1)), t


def _critical(t: Floats, n: int, level: float, sides: bool) -> tuple[Floats, Floats]:
    """Critical values [S] below and above the mean, from t [resamples, S] of samples of n.

    The quantile of |t|, at least Student's; with ``sides`` also at least the quantile of t on that side.
    """
    rank = int(np.ceil(round((len(t) + 1) * level, 6))) - 1
    least = np.maximum(np.partition(np.abs(t), rank, axis=0)[rank], stats.t.ppf((1 + level) / 2, n - 1))
    if not sides:
        return least, least
    tail = int(np.ceil(round((len(t) + 1) * (1 + level) / 2, 6))) - 1
    ordered = np.sort(t, axis=0)
    return np.maximum(least, ordered[tail]), np.maximum(least, -ordered[len(t) - 1 - tail])
