"""The in-place rule keeps the same sets, in distribution, as the paper's rule written down naively."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from kvkeep.budget import Budget
from kvkeep.policies import RandomAttention
from kvkeep.protection import Protection
from reference import Slots, indicators, naive_kept, pairs, same_mean

P_MIN = 1e-4
HEADS = 5000

# budget, protection, prompt length, K and protected positions worked out by hand, rounds
CASES = {
    "total": (Budget(16, 4), "prompt", 4, 16, 4, 4),
    "total, window < every": (Budget(14, 5, 2), "prompt", 3, 14, 3, 4),
    "total, window > every": (Budget(16, 2, 6), "prompt", 3, 16, 3, 5),
    "total, more survivors move than stay": (Budget(10, 6, 1), "prompt", 2, 10, 2, 4),
    "total, over-long prompt": (Budget(12, 4), "sinks:2", 24, 12, 2, 3),
    "total, half a prompt": (Budget(16, 4), "prompt:0.5", 8, 16, 4, 3),
    "trace": (Budget(10, 3, scope="trace"), "prompt", 5, 15, 5, 4),
    "grow": (Budget(10, 3, 3, scope="grow"), "prompt", 8, 14, 8, 4),
    "grow, own room": (Budget(10, 3, 3, scope="grow", room=8), "prompt", 6, 14, 6, 4),
}


@cache
def real(case: str, unit: int = 1) -> np.ndarray:
    budget, protection, prompt, K, _, rounds = CASES[case]
    slots = Slots(RandomAttention(unit=unit), budget, Protection.parse(protection), [prompt], [17], 2, HEADS // 2, 1)
    slots.rounds(rounds)
    kept = slots.kept().view(HEADS, K).numpy()
    return indicators(kept, slots.rows[0].seen)


@cache
def naive(case: str, slope: float = 0.0) -> np.ndarray:
    budget, _, prompt, K, protected, rounds = CASES[case]
    rng = np.random.default_rng(5)
    score = (lambda p: slope * p) if slope else None
    rows = [naive_kept(rng, K, budget.every, budget.window, protected, prompt, rounds, score) for _ in range(HEADS)]
    return indicators(np.array(rows), max(max(row) for row in rows) + 1)


@pytest.mark.parametrize("case", CASES)
def test_positions_are_kept_as_often(case: str) -> None:
    """Inclusion of every position after several rounds: same distribution, same last token."""
    assert real(case).shape == naive(case).shape
    assert same_mean(real(case), naive(case)) > P_MIN


@pytest.mark.parametrize("case", ["total", "total, window < every", "total, window > every", "trace"])
def test_pairs_are_kept_as_often(case: str) -> None:
    """Co-inclusion of every pair: moving survivors about must not couple the fates of neighbours."""
    assert same_mean(pairs(real(case)), pairs(naive(case))) > P_MIN


def test_these_tests_can_fail() -> None:
    """A slight preference for new tokens, and units (right one by one, wrong in pairs), are told apart."""
    assert same_mean(real("total"), naive("total", slope=0.005)) < P_MIN
    assert same_mean(real("total", unit=2), naive("total")) > P_MIN
    assert same_mean(pairs(real("total", unit=2)), pairs(naive("total"))) < P_MIN


def test_total_refuses_what_the_other_scopes_accept() -> None:
    """A prompt that leaves no room is never cut: total raises, trace and grow bring their own K."""
    for scope, kept in (("trace", 16 + 13), ("grow", 13 + 8)):
        slots = Slots(RandomAttention(), Budget(16, 4, scope=scope), Protection.parse("prompt"), [13], [0])
        slots.rounds(2)
        assert slots.kept().shape[-1] == kept
    with pytest.raises(ValueError, match="13 protected entries and a window of 4"):
        Slots(RandomAttention(), Budget(16, 4), Protection.parse("prompt"), [13], [0])
