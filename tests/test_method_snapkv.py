"""SnapKV's options on hand-made rounds (test_signals.py and test_hf_scored.py have more)."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from formulas.snapkv import snapkv
from kvkeep.plan import eviction_order
from kvkeep.policies import SnapKV, make_policy
from kvkeep.testing import Made, check_policy

#: More queries than a row has tokens; queries whose every neighbour is gone.
LONG: tuple[dict[str, Any], ...] = (
    {"lengths": [60, 9], "w": 12},
    {"lengths": [90, 47], "kept": 14, "protected": 0, "w": 40},
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduce": "sum"},
        {"kernel": 7, "pool": "max"},
        {"kernel": 3, "pool": "max", "group": "max"},
        {"group": "max", "reduce": "sum"},
        {"kernel": 1},
    ],
)
def test_formula(options: dict[str, Any]) -> None:
    policy, formula = make_policy("snapkv", options), partial(snapkv, **options)
    for shapes in ({}, {"shapes": LONG}):
        found = check_policy(policy, formula, **shapes)
        assert found.near <= found.compared // 50


def test_the_formula_can_fail() -> None:
    for other in ({"kernel": 3}, {"pool": "max"}, {"group": "max"}):
        with pytest.raises(AssertionError, match="by the reference"):
            check_policy(SnapKV(), partial(snapkv, **other))


@pytest.mark.parametrize("options", [{}, {"kernel": 7, "pool": "max", "group": "max"}])
def test_sum_and_mean_choose_alike(options: dict[str, Any]) -> None:
    made = Made([60, 31], w=8)  # a power of two: the same floats but for their exponent
    mean, total = (SnapKV(reduce=r, **options).score(made.view()) for r in ("mean", "sum"))  # type: ignore[arg-type]
    assert torch.equal(total, 8 * mean)
    count = [len(row[0][0].candidates) for row in made.heads_of]
    assert torch.equal(eviction_order(mean, count).argsort(-1), eviction_order(total, count).argsort(-1))


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="reduce must be mean or sum, got 'max'"):
        make_policy("snapkv", {"reduce": "max"})
    with pytest.raises(ValueError, match="kernel must be a whole number of at least 1, got True"):
        make_policy("snapkv", {"kernel": True})
    assert SnapKV() == SnapKV(0, 5, "avg", "mean", "mean")
