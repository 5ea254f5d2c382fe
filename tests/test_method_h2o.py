"""H2O: what an entry has received so far, as a sum and as a mean."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from formulas.h2o import h2o, received
from kvkeep import Settings
from kvkeep.policies import H2O, make_policy
from kvkeep.testing import Made, check_policy


@pytest.mark.parametrize("count", ["cumulative", "mean"])
def test_formula(count: Any) -> None:
    found = check_policy(H2O(count), partial(h2o, count=count))
    assert found.near <= found.compared // 100


def test_the_variants_differ() -> None:
    with pytest.raises(AssertionError, match="by the reference"):
        check_policy(H2O("mean"), h2o)
    assert H2O() == H2O("cumulative")


def by_hand(made: Made, number: int) -> None:
    """Let every entry receive what queries of every token give it, with rounds that have come and gone in between.

    An entry that is not cached any more was seen until ``gone`` tokens had passed, and counts in nobody's sum but its
    own; the cached ones have been seen since they came.
    """
    rng = np.random.default_rng(number)
    for row, length in zip(made.heads_of, made.lengths, strict=True):
        for e in (e for layer in row for e in layer):
            left = {p: int(rng.integers(p, length)) for p in range(length) if p not in e.cached}
            keys = {p: e.keys.get(p, rng.normal(size=made.width)) for p in range(length)}
            queries = {t: 2 * rng.normal(size=(made.group, made.width)) for t in range(length)}

            def visible(t: int, left: dict[int, int] = left) -> list[int]:
                return [p for p in range(t + 1) if left.get(p, t) >= t]

            e.received.update({p: x for p, x in received(queries, keys, visible, e.scaling).items() if p in e.cached})


def test_the_sum_is_the_brute_force_sum() -> None:
    """What all attention rows of a run add up to, row after row, is what the method ranks by; the last row is not."""
    made = Made([50, 21, 9])
    by_hand(made, 0)
    scores = H2O().score(made.view())
    for r, row in enumerate(made.heads_of):
        for i, layer in enumerate(row):
            for h, e in enumerate(layer):
                expected = torch.tensor([e.received[p] for p in e.candidates])
                assert torch.allclose(scores[r, i, h, : len(expected)], expected.float(), rtol=1e-6)
    found = check_policy(H2O(), h2o, prepare=partial(by_hand, number=1))
    assert found.near <= found.compared // 100


def test_the_sum_favours_age_and_the_mean_does_not() -> None:
    """Queries that look at all they see alike, but for one token that always gets double."""
    made = Made([40], kept=40, layers=1, heads=1)
    e, loud = made.heads_of[0][0][0], 30
    for p in e.cached:
        shares = [(2 if p == loud else 1) / (t + 1 + (t >= loud)) for t in range(p, 40)]
        e.received[p] = sum(shares)
    rest = [p for p in e.candidates if p != loud]
    cumulative, mean = (
        dict(zip(e.candidates, H2O(count).score(made.view())[0, 0, 0].tolist(), strict=True))  # type: ignore[arg-type]
        for count in ("cumulative", "mean")
    )
    assert all(cumulative[a] > cumulative[b] for a, b in pairwise(rest))
    assert cumulative[loud] < cumulative[rest[0]]
    assert max(e.candidates[5:], key=mean.__getitem__) == loud


def test_options_and_schedule() -> None:
    with pytest.raises(ValueError, match="count must be cumulative or mean, got 'sum'"):
        make_policy("h2o", {"count": "sum"})
    budget = Settings("h2o", budget=100, **H2O().schedule(100)).make_budget()
    assert budget is not None
    assert (budget.total, budget.every, budget.window) == (100, 1, 50)
    assert "count" in H2O.shown
    assert "count=cumulative" in H2O.rule
    assert H2O.published_protection == "none"
    assert H2O().scope == "head"
