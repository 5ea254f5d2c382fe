"""How many problems a difference needs, before anything is run.

The model of a paired difference: with one run a side, a problem's difference has a standard deviation
``sd``. For 0/1 scores it follows from the *discordant rate* q, the share of problems that one side solves
and the other does not: sd**2 = q - difference**2. Of that variance the share ``noise`` is the luck of
single runs and falls with their number; the rest is what differs from problem to problem, and only more
problems help against it: sd_R**2 = sd**2 * (1 - noise + noise / R).
"""

from __future__ import annotations

from math import ceil, sqrt
from typing import Literal

import numpy as np
from scipy import stats

from .intervals import PSEUDO_SPREAD

DISCORDANT = 0.3
"""Assumed discordant rate of one run a side where nothing is known. Sampling alone makes two runs of the *same*
policy differ on 2 E[p (1 - p)] of the problems: 0.26 if the chances p to solve a problem are spread like
Beta(0.6, 0.5), many near 0 and many near 1; the rest is for what the policy changes. Look at a pilot's."""

NOISE = 0.75
"""Assumed share of the one-run variance that is the luck of single runs. 1 would let runs replace problems."""

Test = Literal["interval", "sign"]


def power_of(
    n: int,
    difference: float,
    *,
    sd: float | None = None,
    discordant: float | None = None,
    runs: int = 1,
    noise: float = NOISE,
    level: float = 0.95,
    test: Test = "interval",
) -> float:
    """The chance that n problems show a difference.

    Args:
        n: problems.
        difference: true mean difference of the scores, in units of their range (0.05 is 5 points).
        sd: standard deviation of one problem's difference with one run a side, in the same units.
        discordant: the discordant rate q instead, for 0/1 scores; 0.3 if neither is given.
        runs: runs of each problem a side, averaged.
        noise: share of the variance that is the luck of single runs, 0 to 1.
        level: of the interval. For one of m comparisons under Holm, ``1 - 0.05 / m`` is the safe choice.
        test: ``interval``: the interval of ``compare`` excludes 0 on either side. ``sign``: the exact sign test
            is significant; it is the stricter one, and needs the discordant rate and one run.

    Raises:
        ValueError: an argument out of range, both ``sd`` and ``discordant``, or ``test="sign"`` without one run
            and a discordant rate.
    """
    if n < 2:
        raise ValueError(f"a comparison needs at least 2 problems, got {n}")
    if not 0 < level < 1:
        raise ValueError(f"level must lie in (0, 1), got {level}")
    if test == "sign":
        if sd is not None or runs != 1:
            raise ValueError("the power of the sign test needs discordant= and one run per problem")
        return _sign_power(n, difference, _rate(discordant, difference), level)
    return _interval_power(
        n, difference, spread(difference, sd=sd, discordant=discordant, runs=runs, noise=noise), level
    )


def problems_needed(
    difference: float,
    *,
    sd: float | None = None,
    discordant: float | None = None,
    runs: int = 1,
    noise: float = NOISE,
    power: float = 0.8,
    level: float = 0.95,
    test: Test = "interval",
) -> int:
    """The fewest problems that show a difference with the given power. For the arguments see :func:`power_of`.

    Raises:
        ValueError: as :func:`power_of`; also a difference of 0, which no number of problems shows, or more
            problems than 100 million.
    """
    if difference == 0:
        raise ValueError("no number of problems shows a difference of 0")
    if not 0 < power < 1:
        raise ValueError(f"power must lie in (0, 1), got {power}")

    def enough(n: int) -> bool:
        found = power_of(n, difference, sd=sd, discordant=discordant, runs=runs, noise=noise, level=level, test=test)
        return found >= power

    low, high = 1, 2
    while not enough(high):
        low, high = high, 2 * high
        if high > 10**8:
            raise ValueError(f"a difference of {difference:g} needs more than 100 million problems")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def spread(
    difference: float,
    *,
    sd: float | None = None,
    discordant: float | None = None,
    runs: int = 1,
    noise: float = NOISE,
) -> float:
    """Standard deviation of a problem's difference, averaged over ``runs`` runs a side.

    Raises:
        ValueError: an argument out of range, or both ``sd`` and ``discordant``.
    """
    if sd is not None and discordant is not None:
        raise ValueError("pass sd= or discordant=, not both")
    if runs < 1:
        raise ValueError(f"runs must be at least 1, got {runs}")
    if not 0 <= noise <= 1:
        raise ValueError(f"noise is a share of the variance and must lie in [0, 1], got {noise}")
    if sd is None:
        sd = sqrt(_rate(discordant, difference) - difference**2)
    if not 0 < sd < float("inf"):
        raise ValueError(f"the standard deviation of the differences must be positive, got {sd}")
    return sd * sqrt(1 - noise + noise / runs)


def _rate(discordant: float | None, difference: float) -> float:
    """The discordant rate; the assumed one grows with a difference that it could not hold."""
    if not -1 < difference < 1:
        raise ValueError(f"difference must lie in (-1, 1), got {difference}; for other units pass sd=")
    if discordant is None:
        return max(DISCORDANT, abs(difference))
    if not max(abs(difference), 1e-12) <= discordant <= 1:
        raise ValueError(f"discordant must lie in [{abs(difference):g}, 1] for that difference, got {discordant}")
    return discordant


def _interval_power(n: int, difference: float, sd: float, level: float) -> float:
    """Noncentral t, with the pull of the interval's two pseudo-problems towards 0.

    The sample's sum of differences exceeds what the interval tolerates: critical value times sqrt of the sum of
    squares with the pseudo-problems in it.
    """
    total = n + 2
    squares = n * (sd**2 + difference**2) + 2 * PSEUDO_SPREAD * min(1.0, sd**2 + difference**2)
    tolerated = sqrt(total / (total - 1) * (squares - (n * difference) ** 2 / total))
    critical = float(stats.t.ppf((1 + level) / 2, total - 1)) * tolerated / (sqrt(n) * sd)
    centre = sqrt(n) * difference / sd
    if abs(centre) > 30:  # the tails of scipy's noncentral t fail far out; the power is 1 there
        return float(stats.norm.sf(critical - centre) + stats.norm.cdf(-critical - centre))
    return float(stats.nct.sf(critical, total - 1, centre) + stats.nct.cdf(-critical, total - 1, centre))


def _sign_power(n: int, difference: float, discordant: float, level: float) -> float:
    """Exact: over the number of discordant problems, the chance of a significant split among them."""
    # Beyond 12 standard deviations nothing is left of the binomial.
    reach = ceil(12 * sqrt(n * discordant * (1 - discordant)) + 12)
    middle = round(n * discordant)
    count = np.arange(max(0, middle - reach), min(n, middle + reach) + 1)
    alpha = 1 - level
    # The largest number of losses k with 2 P(X <= k) <= alpha; -1 if none.
    k = stats.binom.ppf(alpha / 2, count, 0.5)
    k = np.where(2 * stats.binom.cdf(k, count, 0.5) <= alpha, k, k - 1)
    wins = (1 + difference / discordant) / 2
    split = stats.binom.cdf(k, count, 1 - wins) + stats.binom.cdf(k, count, wins)
    return float((stats.binom.pmf(count, n, discordant) * split).sum())
