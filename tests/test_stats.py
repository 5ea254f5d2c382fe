"""Statistics of comparisons: intervals cover, tests are exact, plans hold, and nothing is dropped silently."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from math import comb, inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from kvkeep.evals.intervals import interval_bounds
from kvkeep.evals.stats import Scores, compare, holm, mean_interval, per_problem, sign_test


def scores(values: Any, runs: int = 1) -> dict[str, list[float]]:
    return {f"p{i}": [float(value)] * runs for i, value in enumerate(values)}


def shuffled(given_scores: Scores) -> dict[str, Any]:
    names = list(given_scores)
    np.random.default_rng(5).shuffle(names)
    return {name: given_scores[name] for name in names}


# ---------------------------------------------------------------- intervals


def experiment(n: int = 40, runs: int = 3) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    rng = np.random.default_rng(7)
    draw = rng.integers(0, 2, (2, n, runs)).astype(float)
    return tuple({f"q{i}": list(arm[i]) for i in range(n)} for arm in draw)  # type: ignore[return-value]


def test_nothing_depends_on_the_order_of_problems_or_runs() -> None:
    a, b = experiment()
    assert compare(a, b) == compare(shuffled(a), shuffled(shuffled(b)))
    assert mean_interval(a) == mean_interval(shuffled(a))
    assert compare(a, b) == compare({name: runs[::-1] for name, runs in a.items()}, b)
    graded = {"x": [0.1, 0.2, 0.3], "y": [0.7, 0.1, 0.2]}
    turned = {"x": [0.3, 0.2, 0.1], "y": [0.2, 0.7, 0.1]}
    assert compare(graded, turned).ties == 2  # although 0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1 in floats


def test_same_seed_same_interval() -> None:
    a, b = experiment()
    assert compare(a, b, seed=3) == compare(a, b, seed=3)
    skewed = {name: [float(np.exp(i / 10))] for i, name in enumerate(a)}
    assert mean_interval(skewed, bounds=None, seed=3) != mean_interval(skewed, bounds=None, seed=4)


def test_compare_averages_runs_counts_and_changes_sign() -> None:
    a = {"x": [1, 1, 0], "y": [0, 0, 0], "z": [1, 0, 0], "w": [1, 1, 1]}
    b = {"x": [1, 0, 0], "y": [0, 0, 0], "z": [1, 1, 1], "w": [0, 1, 1]}
    found, back = compare(a, b), compare(b, a)
    assert (found.wins, found.losses, found.ties, found.n) == (2, 1, 1, 4)
    assert found.p_sign == sign_test(2, 1)
    assert found.difference.estimate == pytest.approx((1 / 3 + 0 - 2 / 3 + 1 / 3) / 4)
    assert (back.wins, back.losses) == (1, 2)
    assert back.difference.low == pytest.approx(-found.difference.high)
    assert back.difference.high == pytest.approx(-found.difference.low)


def test_runs_are_no_problems() -> None:
    """The same run written down ten times must not make the interval narrower."""
    a, b = experiment(runs=1)
    tenfold = [{name: runs * 10 for name, runs in arm.items()} for arm in (a, b)]
    assert compare(*tenfold).difference == compare(a, b).difference
    assert mean_interval(tenfold[0]) == mean_interval(a)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=60),
    st.sampled_from([0.8, 0.9, 0.95, 0.99]),
)
def test_intervals_contain_the_estimate_within_bounds(pairs: list[tuple[int, int]], level: float) -> None:
    a, b = scores([x / 4 for x, _ in pairs]), scores([y / 4 for _, y in pairs])
    for found, least in ((mean_interval(a, level=level), 0), (compare(a, b, level=level).difference, -1)):
        assert least <= found.low <= found.estimate <= found.high <= 1
        assert found.low < found.high
        assert (found.n, found.level) == (len(pairs), level)


def test_units_do_not_matter() -> None:
    a, b = experiment()
    percent = [{name: [100 * run for run in runs] for name, runs in arm.items()} for arm in (a, b)]
    small, large = compare(a, b).difference, compare(*percent, bounds=(0, 100)).difference
    assert (large.low, large.high) == pytest.approx((100 * small.low, 100 * small.high))
    small, large = mean_interval(a), mean_interval(percent[0], bounds=(0, 100))
    assert (large.low, large.high) == pytest.approx((100 * small.low, 100 * small.high))


def test_close_to_student_where_all_is_normal() -> None:
    values = scipy_stats.norm.ppf((np.arange(400) + 0.5) / 400) * 0.1 + 0.5
    found = mean_interval(scores(values))
    half = 1.966 * values.std(ddof=1) / 20
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.05)
    assert found.estimate == pytest.approx(0.5)


@pytest.mark.parametrize("n", [2, 30, 200, 1000])
def test_no_spread_is_not_no_doubt(n: int) -> None:
    ones, zeros = scores([1] * n), scores([0] * n)
    solved, none, tied = mean_interval(ones), mean_interval(zeros), compare(ones, ones)
    assert solved.estimate == solved.high == 1
    assert none.estimate == none.low == 0
    assert none.high == pytest.approx(1 - solved.low)
    # At least what the exact binomial says, and not absurdly more: Clopper and Pearson's lower end is 0.025^(1/n).
    exact = 1 - 0.025 ** (1 / n)
    assert exact * 0.9 <= 1 - solved.low <= 2 * exact
    assert tied.difference.low == -tied.difference.high < 0
    assert 0.3 * exact <= tied.difference.high <= max(exact, 2 / n)
    assert (tied.ties, tied.p_sign, tied.difference.estimate) == (n, 1.0, 0.0)
    swept = compare(ones, zeros)
    assert swept.difference.high == swept.difference.estimate == 1
    assert swept.difference.low < 1


def test_more_problems_narrower() -> None:
    widths = [1 - mean_interval(scores([1] * n)).low for n in (10, 30, 100, 300)]
    assert widths == sorted(widths, reverse=True)


def test_without_bounds_a_constant_limits_nothing() -> None:
    same = scores([0.25] * 30)
    assert (mean_interval(same, bounds=None).low, mean_interval(same, bounds=None).high) == (-inf, inf)
    tied = compare(same, same, bounds=None)
    assert (tied.difference.low, tied.difference.high, tied.difference.estimate) == (-inf, inf, 0)
    # One problem in thirty carries everything: more than 1 resample in 3 has not seen it.
    rare = compare(scores([5] + [0] * 29), scores([0] * 30), bounds=None).difference
    assert (rare.low, rare.high) == (-inf, inf)
    usual = mean_interval(scores(np.random.default_rng(0).lognormal(size=50)), bounds=None)
    assert 0 < usual.low < usual.estimate < usual.high < 4


def test_one_problem_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 problems"):
        mean_interval({"only": [1, 0, 1]})
    with pytest.raises(ValueError, match="at least 2 problems"):
        compare({"only": [1.0]}, {"only": [0.0]})


def test_missing_cells_are_named() -> None:
    a, b = scores([1, 0, 1, 1]), scores([1, 0, 1, 1])
    del b["p2"]
    with pytest.raises(ValueError, match="the second lacks p2"):
        compare(a, b)
    del a["p0"]
    with pytest.raises(ValueError, match="the first lacks p0; the second lacks p2"):
        compare(a, b)


@pytest.mark.parametrize(
    ("bad", "match"),
    [
        ({}, "not one problem"),
        ({"x": [1.0], "y": [nan]}, "NaN or infinite for: y"),
        ({"x": [inf], "y": [1.0]}, "NaN or infinite for: x"),
        ({"x": [1.0, 0.0], "y": [1.0], "z": [1.0, 1.0]}, r"y \(1\)"),
        ({"x": [1.0], "y": []}, r"y \(0\)"),
        ({"x": [], "y": []}, "runs"),
        ({"x": [1.0], "y": [1.5]}, r"outside the bounds \[0, 1\] for: y"),
    ],
)
def test_bad_scores_are_named(bad: Scores, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        mean_interval(bad)
    good = {name: [1.0] for name in bad} or scores([1, 0])
    for sides in ((bad, good), (good, bad)):
        with pytest.raises(ValueError, match=match):
            compare(*sides)


def test_other_refusals() -> None:
    a = scores([1, 0, 1])
    with pytest.raises(ValueError, match="same number of runs per problem, got 1 and 2"):
        compare(a, scores([1, 0, 1], runs=2))
    with pytest.raises(ValueError, match="bounds must be"):
        mean_interval(a, bounds=(1.0, 0.0))
    for level in (0.0, 1.0, 0.9999):
        with pytest.raises(ValueError, match="level"):
            mean_interval(a, level=level)


def test_per_problem_averages_and_sorts() -> None:
    assert list(per_problem({"b": [1, 0], "a": [0.5, 1]}).items()) == [("a", 0.75), ("b", 0.5)]


def test_many_samples_at_once_are_the_same_as_one_by_one() -> None:
    samples = np.random.default_rng(2).random((5, 40))
    for kind, bounds in itertools.product(("mean", "difference"), ((0.0, 1.0), None)):
        together = interval_bounds(samples, kind, bounds)  # type: ignore[arg-type]
        for i, sample in enumerate(samples):
            alone = interval_bounds(sample[None], kind, bounds)  # type: ignore[arg-type]
            assert [end[0] for end in alone] == pytest.approx([end[i] for end in together])


# ---------------------------------------------------------------- tests


def enumerated_sign_test(wins: int, losses: int) -> float:
    """All 2^n outcomes, those at most as likely as the one seen."""
    n = wins + losses
    return sum(comb(n, k) for k in range(n + 1) if comb(n, k) <= comb(n, wins)) / 2**n


def test_sign_test_against_enumeration_and_scipy() -> None:
    for wins, losses in itertools.product(range(25), repeat=2):
        expected = enumerated_sign_test(wins, losses) if wins + losses else 1.0
        assert sign_test(wins, losses) == pytest.approx(expected, abs=1e-12)
        assert sign_test(wins, losses) == sign_test(losses, wins)
        if wins + losses:
            assert sign_test(wins, losses) == scipy_stats.binomtest(wins, wins + losses).pvalue
    # Three heads of three, out of the eight outcomes one by one.
    outcomes = list(itertools.product((0, 1), repeat=3))
    assert sign_test(3, 0) == sum(sum(o) in (0, 3) for o in outcomes) / len(outcomes)
    assert sign_test(0, 0) == 1.0
    with pytest.raises(ValueError, match="negative"):
        sign_test(-1, 2)


def test_sign_test_holds_its_level() -> None:
    for n in (5, 20, 61):
        chances = scipy_stats.binom.pmf(np.arange(n + 1), n, 0.5)
        rejected = np.array([sign_test(k, n - k) <= 0.05 for k in range(n + 1)])
        assert chances[rejected].sum() <= 0.05


def holm_by_definition(p: dict[str, float]) -> dict[str, float]:
    """The largest of (m - j + 1) p_(j) over the j up to each rank, at most 1."""
    ordered = sorted(p.items(), key=lambda item: item[1])
    steps = [(len(p) - j) * value for j, (_, value) in enumerate(ordered)]
    return {name: min(1.0, max(steps[: j + 1])) for j, (name, _) in enumerate(ordered)}


families = st.dictionaries(st.text(max_size=3), st.floats(0, 1), max_size=8)


@given(families, st.floats(0.001, 0.5))
def test_holm(p: dict[str, float], alpha: float) -> None:
    adjusted = holm(p)
    assert adjusted == holm_by_definition(p)
    assert list(adjusted) == list(p)
    assert adjusted == {name: holm(dict(reversed(p.items())))[name] for name in p}
    for x, y in itertools.product(p, repeat=2):
        assert p[x] <= adjusted[x] <= min(1.0, len(p) * p[x]) or adjusted[x] == pytest.approx(p[x])
        assert adjusted[x] <= adjusted[y] or p[x] > p[y]
    assert set(step_down(p, alpha)) == {name for name in p if adjusted[name] <= alpha}


def step_down(p: dict[str, float], alpha: float) -> Iterator[str]:
    """Holm's procedure as he gave it: reject the smallest while it is at most alpha over what is left."""
    for rank, name in enumerate(sorted(p, key=lambda name: p[name])):
        if (len(p) - rank) * p[name] > alpha:
            return
        yield name


def test_holm_by_hand() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06})
    assert holm({}) == {}
    for bad in (nan, -0.1, 1.1):
        with pytest.raises(ValueError, match="p-values"):
            holm({"a": 0.5, "b": bad})


def test_results_are_plain_numbers() -> None:
    """They go into JSON as they are."""
    a, b = experiment()
    found = compare(a, b)
    json.dumps([found.difference.__dict__, found.wins, found.losses, found.ties, found.p_sign, found.n])
    assert all(type(value) is float for value in (found.p_sign, found.difference.low, found.difference.high))
