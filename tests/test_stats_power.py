"""Plans hold: the number of problems that is asked for shows the difference as often as promised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvkeep.evals.intervals import interval_bounds
from kvkeep.evals.power import power_of, problems_needed, spread
from kvkeep.evals.stats import sign_test


def excludes_zero(differences: np.ndarray[Any, Any]) -> float:
    ends = [interval_bounds(part, "difference", (0.0, 1.0)) for part in np.array_split(differences, 4)]
    return float(np.mean(np.concatenate([(low > 0) | (high < 0) for low, high in ends])))


def outcomes(n: int, difference: float, discordant: float, datasets: int = 3000) -> np.ndarray[Any, Any]:
    chances = [(discordant + difference) / 2, (discordant - difference) / 2, 1 - discordant]
    return np.random.default_rng(n).choice([1.0, -1.0, 0.0], p=chances, size=(datasets, n))


@pytest.mark.parametrize(("difference", "discordant"), [(0.2, 0.3), (0.1, 0.15), (0.3, 0.4), (-0.2, 0.5)])
def test_power_at_problems_needed(difference: float, discordant: float) -> None:
    n = problems_needed(difference, discordant=discordant)
    assert power_of(n, difference, discordant=discordant) >= 0.8 > power_of(n - 1, difference, discordant=discordant)
    assert excludes_zero(outcomes(n, difference, discordant)) == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("power", [0.5, 0.9])
def test_other_powers(power: float) -> None:
    n = problems_needed(0.15, discordant=0.3, power=power)
    assert excludes_zero(outcomes(n, 0.15, 0.3)) == pytest.approx(power, abs=0.03)


@pytest.mark.parametrize(("difference", "discordant"), [(0.2, 0.3), (0.1, 0.15)])
def test_power_of_the_sign_test(difference: float, discordant: float) -> None:
    n = problems_needed(difference, discordant=discordant, test="sign")
    found = outcomes(n, difference, discordant)
    wins, losses = (found > 0).sum(axis=1), (found < 0).sum(axis=1)
    assert np.mean([sign_test(*pair) <= 0.05 for pair in zip(wins, losses, strict=True)]) == pytest.approx(
        power_of(n, difference, discordant=discordant, test="sign"), abs=0.025
    )
    assert n >= problems_needed(difference, discordant=discordant)


def test_runs_reduce_only_the_noise() -> None:
    runs, noise, difference = 4, 0.6, 0.1
    n = problems_needed(difference, discordant=0.3, runs=runs, noise=noise)
    sd = spread(difference, discordant=0.3)
    rng = np.random.default_rng(1)
    between = sd * np.sqrt(1 - noise) * rng.standard_normal((3000, n))
    within = sd * np.sqrt(noise) * rng.standard_normal((3000, n, runs)).mean(axis=2)
    assert excludes_zero(difference + between + within) == pytest.approx(0.8, abs=0.03)
    needed = [problems_needed(difference, runs=r, noise=noise) for r in (1, 4, 16, 10**6)]
    assert needed == sorted(needed, reverse=True)
    assert needed[-1] >= 0.9 * (1 - noise) * needed[0]
    assert len({problems_needed(difference, runs=r, noise=0) for r in (1, 4)}) == 1


def test_power_is_monotone_and_close_to_the_textbook() -> None:
    found = [power_of(n, 0.1) for n in (2, 10, 50, 200, 1000, 10000)]
    assert found == sorted(found)
    assert found[-1] == pytest.approx(1.0)
    assert problems_needed(0.01, sd=0.5) == pytest.approx((1.95996 + 0.84162) ** 2 * 0.25 / 1e-4, rel=0.01)
    assert problems_needed(0.1) == problems_needed(-0.1) == problems_needed(0.1, discordant=0.3)
    assert problems_needed(0.1, level=1 - 0.05 / 6) > problems_needed(0.1)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"difference": 0}, "difference of 0"),
        ({"difference": 0.1, "sd": 0.5, "discordant": 0.3}, "not both"),
        ({"difference": 0.4, "discordant": 0.3}, "discordant must lie"),
        ({"difference": 2}, "pass sd="),
        ({"difference": 0.1, "sd": 0}, "must be positive"),
        ({"difference": 0.1, "runs": 0}, "runs"),
        ({"difference": 0.1, "noise": 1.5}, "noise"),
        ({"difference": 0.1, "power": 1}, "power"),
        ({"difference": 0.1, "level": 1}, "level"),
        ({"difference": 0.1, "runs": 2, "test": "sign"}, "one run"),
        ({"difference": 1e-6}, "100 million"),
    ],
)
def test_power_refusals(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        problems_needed(**arguments)
