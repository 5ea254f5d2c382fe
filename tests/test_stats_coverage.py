"""How often 95% intervals hold, measured by simulation; the percentile bootstrap fails the same demands."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from kvkeep.evals.coverage import coverage, measure, simulate_bounded
from kvkeep.evals.intervals import Kind

Row = tuple[int, dict[str, Any], bool, float, float]
"""Problems, scenario, near-degenerate or not, coverage of ours, coverage of the percentile bootstrap."""


def near_degenerate(n: int, scenario: dict[str, Any]) -> bool:
    """Few problems carry the spread: under 20 that differ, or under 20 expected on the rare side of a mean."""
    if scenario.get("metric") == "unbounded":
        return False
    accuracy = scenario["accuracy"]
    if scenario["kind"] == "mean":
        return n * min(accuracy, 1 - accuracy) < 20
    arguments = (scenario[key] for key in ("metric", "accuracy", "difference", "correlation", "runs"))
    first, second = simulate_bounded(np.random.default_rng(0), (1, 20000), *arguments)
    squares = (first - second) ** 2
    return bool(n * squares.mean() ** 2 / max(float((squares**2).mean()), 1e-12) < 20)


def measured(sizes: tuple[int, ...], scenarios: list[dict[str, Any]], datasets: int) -> list[Row]:
    return [
        (
            n,
            scenario,
            near_degenerate(n, scenario),
            coverage(n, datasets=datasets, **scenario),
            coverage(n, datasets=datasets // 4, method="percentile", resamples=999, **scenario),
        )
        for n, scenario in itertools.product(sizes, scenarios)
    ]


def show(title: str, rows: list[Row]) -> None:
    print(f"\n{title}: measured coverage of 95% intervals, mean [least, most]")
    for n, sparse in itertools.product(sorted({row[0] for row in rows}), (False, True)):
        found = np.array([row[3:] for row in rows if row[0] == n and row[2] == sparse])
        if len(found):
            ours, plain = (f"{c.mean():.3f} [{c.min():.3f}, {c.max():.3f}]" for c in found.T)
            name = "near-degenerate" if sparse else "others"
            print(f"  n={n:<4} {name:<15} {len(found):>3} scenarios   bootstrap-t {ours}   percentile {plain}")


def grid(kind: Kind, means: list[tuple[float, float]], correlations: tuple[float, ...]) -> list[dict[str, Any]]:
    cases = itertools.product(("binary", "graded"), (1, 4), correlations, means)
    return [
        {"kind": kind, "metric": m, "runs": r, "correlation": c, "accuracy": a, "difference": d}
        for m, r, c, (a, d) in cases
    ]


DIFFERENCES = [(0.5, 0.0), (0.5, 0.05), (0.5, 0.2), (0.9, 0.05), (0.98, 0.0), (0.98, 0.02), (0.99, 0.05)]
MEANS = [(a, 0.0) for a in (0.02, 0.5, 0.8, 0.95, 0.99)]
TAILS = [
    {"metric": "unbounded", "kind": kind, "difference": d, "correlation": c, "sigma": sigma}
    for sigma in (0.3, 0.6, 1.0)
    for kind, d, c in (("mean", 0.0, 0.0), ("difference", 0.0, 0.0), ("difference", 0.5, 0.8))
]


def check_coverage(rows: list[Row], least_small: float) -> None:
    """The demands. The slack of 0.01 is one and a half standard errors of 1000 simulated data sets."""
    for n, scenario, sparse, ours, _ in rows:
        told = f"n={n} {scenario}: {ours:.3f}"
        assert ours >= (0.93 - 0.01 if n >= 200 else least_small), told
        if n >= 200 and not sparse:
            assert ours <= 0.97 + 0.01, told
    for n in {row[0] for row in rows}:
        regular = [row[3] for row in rows if row[0] == n and not row[2]]
        assert not regular or 0.93 <= np.mean(regular) <= 0.97, (n, np.mean(regular))


@pytest.mark.slow
def test_coverage_of_some_scenarios() -> None:
    differences = grid("difference", [(0.5, 0.0), (0.9, 0.05)], (0.8,))
    means = grid("mean", [(0.5, 0.0), (0.95, 0.0)], (0.5,))
    for title, scenarios in (("differences", differences), ("means", means), ("without bounds", TAILS[3:6])):
        rows = measured((30, 60, 200), scenarios, datasets=800)
        show(title, rows)
        check_coverage(rows, least_small=0.92)


@pytest.mark.slow
def test_percentile_bootstrap_fails_the_same_check() -> None:
    rows = measured((30, 60), grid("mean", [(0.8, 0.0), (0.95, 0.0)], (0.5,)) + TAILS[:3], datasets=1200)
    with pytest.raises(AssertionError, match="n=30"):
        check_coverage([(n, scenario, sparse, plain, 0.0) for n, scenario, sparse, _, plain in rows], 0.92)
    check_coverage(rows, least_small=0.92)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "scenarios", "least_small"),
    [
        # 0.88: a difference of 0.05 at 0.99 that few problems carry, at 30 problems.
        ("paired differences", grid("difference", DIFFERENCES, (0.0, 0.97)), 0.86),
        ("means", grid("mean", MEANS, (0.0, 0.9)), 0.92),
        ("without bounds", TAILS, 0.91),
    ],
)
def test_coverage_over_the_grid(title: str, scenarios: list[dict[str, Any]], least_small: float) -> None:
    rows = measured((30, 60, 200), scenarios, datasets=1000)
    show(title, rows)
    for row in sorted(rows, key=lambda row: row[3])[:3]:
        print(f"  lowest: n={row[0]} {row[3]:.3f} {row[1]}")
    check_coverage(rows, least_small)


def test_coverage_is_reproducible_and_refuses_nonsense() -> None:
    assert coverage(30, datasets=200) == coverage(30, datasets=200) != coverage(30, datasets=200, seed=1)
    with pytest.raises(ValueError, match="mean scores"):
        coverage(30, accuracy=0.1, difference=0.2)
    with pytest.raises(ValueError, match="correlation"):
        coverage(30, correlation=1.0)


def test_what_is_printed_beside_intervals_is_measured() -> None:
    for metric in ("binary", "unbounded"):
        small, large = (measure(n, metric, datasets=200) for n in (30, 300))
        assert 0.88 <= small.least <= small.mean <= 1
        assert abs(large.mean - 0.95) <= 0.02 <= 1 - large.least
        assert small != large
