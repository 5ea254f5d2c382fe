"""TOVA: the newest query's attention, one kept set a layer."""

from __future__ import annotations

import pytest
import torch

from formulas.tova import tova
from kvkeep import Settings
from kvkeep.budget import Budget
from kvkeep.policies import TOVA, SnapKV, make_policy
from kvkeep.testing import Made, check_policy


def test_formula() -> None:
    found = check_policy(TOVA(), tova)
    assert found.near <= found.compared // 50


def test_heads_share_one_set_that_all_of_them_vote_for() -> None:
    made = Made([60, 9, 31], shared="layer")
    scores = TOVA().score(made.view())
    assert scores.shape == (3, 2, 1, len(made.heads_of[0][0][0].candidates))
    for e in made.heads_of[0][0]:  # another head, another outcome
        before = dict(e.keys)
        e.keys.update({p: 3 * k for p, k in before.items()})
        assert not torch.allclose(TOVA().score(made.view())[0, 0], scores[0, 0])
        e.keys.update(before)
    assert torch.equal(TOVA().score(made.view()), scores)


def test_only_the_newest_query_votes() -> None:
    made = Made([60, 31], shared="layer")
    scores = TOVA().score(made.view())
    for e in (e for row in made.heads_of for layer in row for e in layer):
        e.queries[:, :-1] *= -3
    assert torch.equal(TOVA().score(made.view()), scores)
    assert TOVA().query_window(Budget(32, 8)) == 1


def test_of_one_head_it_is_snapkv_without_neighbours() -> None:
    made = Made([60, 31], heads=1, w=1, shared="layer")
    kept = TOVA().score(made.view()), SnapKV(queries=1, kernel=1).score(made.view())
    n = len(made.heads_of[1][0][0].candidates)
    assert torch.allclose(kept[0][..., :n], kept[1][..., :n], rtol=1e-6)


def test_schedule() -> None:
    budget = Settings("tova", budget=100, **TOVA().schedule(100)).make_budget()
    assert budget is not None
    assert (budget.total, budget.every, budget.window) == (100, 1, 0)
    assert TOVA().scope == "layer"
    with pytest.raises(ValueError, match="it takes none"):
        make_policy("tova", {"queries": 2})
