"""How often the intervals hold: simulated experiments, judged by the code that makes what is printed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import fsum
from typing import Any, Literal

import numpy as np
from scipy.special import ndtr, ndtri

from .intervals import RESAMPLES, Bounds, Floats, Kind, Method, interval_bounds

Metric = Literal["binary", "graded", "unbounded"]

CONCENTRATION = 6.0
"""Of graded scores: Beta with this sum of parameters around a problem's mean."""

#: What :func:`measure` tries on bounded scores: no difference, large ones, and one that few problems carry.
BOUNDED: tuple[dict[str, Any], ...] = (
    {"accuracy": 0.5},
    {"accuracy": 0.9, "difference": 0.1},
    {"accuracy": 0.95, "difference": 0.5},
    {"accuracy": 0.99, "difference": 0.08},  # the weak spot of small samples
    {"accuracy": 0.8, "kind": "mean"},
    {"accuracy": 0.97, "kind": "mean"},
)
#: And on scores without bounds, with tails of two lengths.
UNBOUNDED: tuple[dict[str, Any], ...] = tuple(
    {"metric": "unbounded", "sigma": sigma, "kind": kind} for sigma in (0.5, 1.0) for kind in ("mean", "difference")
)


@dataclass(frozen=True)
class Measured:
    """Coverage of nominal 95% intervals over a few scenarios.

    Attributes:
        mean: over the scenarios.
        least: of the worst one.
        scenarios: their number.
        datasets: simulated experiments of each.
    """

    mean: float
    least: float
    scenarios: int
    datasets: int


@lru_cache(maxsize=32)
def measure(n: int, metric: Metric, runs: int = 1, datasets: int = 400) -> Measured:
    """Coverage at this number of problems, to be printed beside intervals.

    Args:
        n: problems.
        metric: see :func:`coverage`.
        runs: runs of each problem, averaged.
        datasets: simulated experiments of each scenario.
    """
    scenarios = UNBOUNDED if metric == "unbounded" else [{"metric": metric, "runs": runs, **s} for s in BOUNDED]
    found = [coverage(n, datasets=datasets, resamples=999, **scenario) for scenario in scenarios]
    return Measured(fsum(found) / len(found), min(found), len(found), datasets)


def coverage(
    n: int,
    *,
    kind: Kind = "difference",
    metric: Metric = "binary",
    accuracy: float = 0.5,
    difference: float = 0.0,
    correlation: float = 0.8,
    runs: int = 1,
    sigma: float = 0.5,
    method: Method = "bootstrap-t",
    level: float = 0.95,
    datasets: int = 1000,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> float:
    """The share of simulated runs of an experiment whose interval contains the truth.

    Its standard error is sqrt(c (1 - c) / datasets): 0.007 at c = 0.95 and 1000 data sets.

    Args:
        n: problems, at least 2.
        kind: ``mean`` of the first arm, or paired ``difference`` of both.
        metric: ``binary`` 0/1 scores; ``graded`` scores in [0, 1]; ``unbounded`` positive scores with a long tail.
        accuracy: mean score of the first arm over all problems, in (0, 1); not used by ``unbounded``.
        difference: first arm's mean minus the second's. For ``unbounded`` in units of the second's mean.
        correlation: of the two arms' difficulty of a problem, in [0, 1): how alike they are, and how far problems
            lie apart. 0 makes all problems equally hard.
        runs: runs of each problem, averaged.
        sigma: of ``unbounded``, the standard deviation of the log.
        method: see :func:`interval_bounds`.
        level: nominal coverage.
        datasets: simulated experiments.
        resamples: bootstrap resamples of each.
        seed: of the experiments.

    Raises:
        ValueError: a mean outside (0, 1), or a correlation outside [0, 1).
    """
    rng = np.random.default_rng((seed, n))
    shape = (datasets, n)
    if metric == "unbounded":
        first, second = simulate_unbounded(rng, shape, difference, correlation, sigma)
        truth = (1 + difference if kind == "mean" else difference) * float(np.exp(sigma**2 / 2))
    else:
        first, second = simulate_bounded(rng, shape, metric, accuracy, difference, correlation, runs)
        truth = accuracy if kind == "mean" else difference
    samples = first if kind == "mean" else first - second
    bounds: Bounds = None if metric == "unbounded" else (0.0, 1.0)
    low, high = interval_bounds(samples, kind, bounds, level=level, resamples=resamples, method=method)
    # An end that equals the truth contains it, whatever the last bit says.
    return float(np.mean((low <= truth + 1e-9) & (truth - 1e-9 <= high)))


def simulate_bounded(
    rng: np.random.Generator,
    shape: tuple[int, int],
    metric: Metric,
    accuracy: float,
    difference: float,
    correlation: float,
    runs: int,
) -> tuple[Floats, Floats]:
    """Mean scores of two arms on the same problems, each [data sets, problems].

    A problem has one difficulty z for both arms; an arm solves it in a run with probability
    Phi((sqrt(c) z + Phi^-1(mean)) / sqrt(1 - c)), whose mean over problems is exactly ``mean``.
    """
    if not 0 <= correlation < 1:
        raise ValueError(f"correlation must lie in [0, 1), got {correlation}")
    difficulty = rng.standard_normal(shape)

    def arm(mean: float) -> Floats:
        if not 0 < mean < 1:
            raise ValueError(f"mean scores must lie in (0, 1), got {mean:g}")
        chance = ndtr((np.sqrt(correlation) * difficulty + ndtri(mean)) / np.sqrt(1 - correlation))
        if metric == "binary":
            return np.asarray(rng.binomial(runs, chance) / runs)
        chance = np.clip(chance, 1e-9, 1 - 1e-9)
        draws = [rng.beta(CONCENTRATION * chance, CONCENTRATION * (1 - chance)) for _ in range(runs)]
        return np.asarray(np.mean(draws, axis=0))

    first, second = arm(accuracy), arm(accuracy - difference)
    # Multiples of 1 / runs, exactly: ties must be ties after subtracting.
    return first, first - np.round((first - second) * runs) / runs if metric == "binary" else second


def simulate_unbounded(
    rng: np.random.Generator, shape: tuple[int, int], difference: float, correlation: float, sigma: float
) -> tuple[Floats, Floats]:
    """Lognormal scores of two arms, each [data sets, problems]; the second's log has mean 0."""
    shared = rng.standard_normal(shape)
    own = np.sqrt(1 - correlation**2) * rng.standard_normal(shape)
    first = (1 + difference) * np.exp(sigma * shared)
    return first, np.exp(sigma * (correlation * shared + own))
