"""InfoKV: scores, entropy, budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from formulas.infokv import infokv, masses
from formulas.rpc import rpc
from formulas.snapkv import snapkv
from kvkeep import Settings
from kvkeep.budget import Budget, split
from kvkeep.policies import RPC, InfoKV
from kvkeep.testing import Entries, Made, check_policy


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"alpha": 0.5, "tau": 0.5},
        {"region": "cached", "alpha": 0.3},
        {"kernel": 3, "pool": "score"},
        {"kernel": 1, "heads": "layer", "alpha": 0.7},
        {"alpha": 0.0},
        {"seen": "candidates", "kernel": 5, "alpha": 0.6},
        {"reduce": "sum", "alpha": 0.2},
        {"seen": "candidates", "pool": "score", "heads": "layer", "kernel": 3, "alpha": 0.5},
    ],
)
def test_kept_sets_follow_the_formula(options: dict[str, Any]) -> None:
    agreement = check_policy(InfoKV(**options), partial(infokv, **options))
    print(agreement.near, "near ties in", agreement.compared)
    assert agreement.compared > 1000
    assert agreement.near < agreement.compared / 50


def test_with_attention_alone_it_is_snapkv() -> None:
    """alpha = 1 leaves window-mean SnapKV with a kernel of 9."""
    agreement = check_policy(InfoKV(alpha=1.0), partial(snapkv, kernel=9))
    assert agreement.near < agreement.compared / 50


def test_with_attention_alone_and_rpcs_options_it_is_rpc() -> None:
    """What `Settings.published` runs, less the entropy, is RPC."""
    options = {**InfoKV.published_options, "alpha": 1.0, "queries": 0}
    agreement = check_policy(InfoKV(**options), rpc)
    assert agreement.near < agreement.compared / 50
    assert InfoKV().schedule(2048) == RPC().schedule(2048)
    made = Settings.published("infokv", 2048)
    assert made.options == dict(InfoKV.published_options)
    assert made.make_policy().scope == "layer"


def test_a_short_rows_attention_keeps_its_weight() -> None:
    """Of 40 queries that could vote a row of 20 has 20: as if only 20 had been asked for."""
    wide, narrow = Made([20], w=40, kept=16, seed=5), Made([20], w=20, kept=16, seed=5)
    narrow.heads_of = [
        [
            [replace(e, queries=e.queries[:, 20:], query_positions=e.query_positions[20:]) for e in layer]
            for layer in row
        ]
        for row in wide.heads_of
    ]
    scores = [InfoKV(alpha=0.5).score(made.view()) for made in (wide, narrow)]
    assert torch.allclose(*scores, atol=1e-6)


def test_in_the_last_layer_information_is_entropy_alone() -> None:
    """There D = 0, so E = tau H."""

    def of_entropy(row: Sequence[Sequence[Entries]]) -> list[list[dict[int, float]]]:
        return [[{p: e.entropy[p] for p in e.candidates} for e in layer] for layer in row]

    def still(made: Made) -> None:
        for row in made.heads_of:
            for layer in row:
                for e in layer:
                    e.evolution = dict.fromkeys(e.cached, 0.0)

    check_policy(InfoKV(alpha=0.0, tau=0.7), of_entropy, prepare=still)


def test_constant_entropy_ranks_by_change_alone() -> None:
    def of_change(row: Sequence[Sequence[Entries]]) -> list[list[dict[int, float]]]:
        return [[{p: e.evolution[p] for p in e.candidates} for e in layer] for layer in row]

    def level(made: Made) -> None:
        for row in made.heads_of:
            for layer in row:
                for e in layer:
                    e.entropy = dict.fromkeys(e.cached, 0.5)

    check_policy(InfoKV(alpha=0.0), of_change, prepare=level)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("top", [1, 3, 40, 1000])
def test_entropy_of_the_most_probable(top: int, renormalise: bool) -> None:
    """With every token it is plain entropy; with one, renormalised, it is nothing."""
    logits = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0)) * 3
    found = InfoKV(top=top, renormalise=renormalise).entropy(logits)
    p = np.exp(logits.double().numpy())
    p /= p.sum(-1, keepdims=True)
    p = -np.sort(-p, axis=-1)[..., :top]
    if renormalise:
        p /= p.sum(-1, keepdims=True)
    np.testing.assert_allclose(found.numpy(), -(p * np.log(p)).sum(-1), atol=1e-5)
    assert InfoKV(top=top).entropy(torch.tensor([0.0, -torch.inf, -torch.inf])) == 0


def test_layer_budgets_follow_the_mass_of_information() -> None:
    made, policy = Made([60, 47], layers=4, seed=3), InfoKV(adaptive=True)
    for factor, layers in zip((3.0, 1.0, 0.5, 2.0), zip(*made.heads_of, strict=True), strict=True):
        for heads in layers:
            for e in heads:
                e.entropy = {p: h * factor for p, h in e.entropy.items()}
    view = made.view()
    wanted = policy.allot(view, policy.score(view))
    assert wanted is not None
    for r, row in enumerate(made.heads_of):
        mass = masses(row)
        np.testing.assert_allclose(wanted[r], [m / sum(mass) * 4 * view.kept[r] for m in mass], rtol=1e-5)
        assert wanted[r].argmax() == 0
        assert sum(split(wanted[r].tolist(), 4 * view.kept[r], 7, [40] * 4)) == 4 * view.kept[r]
    assert InfoKV().allot(view, policy.score(view)) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"alpha": 1.5}, "alpha must be a number from 0 to 1, got 1.5"),
        ({"top": 0}, "top must be"),
        ({"tau": -1.0}, "tau must be"),
        ({"kernel": 4}, "kernel must be odd"),
        ({"shift": 2}, "shift is 1"),
        ({"shift": True}, "shift is 1"),
        ({"region": "all"}, "region must be"),
        ({"adaptive": 1}, "adaptive must be true or false"),
        ({"pool": "max"}, "pool must be"),
        ({"heads": "group"}, "heads must be"),
    ],
)
def test_bad_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        InfoKV(**options)


def test_how_many_queries_vote() -> None:
    assert InfoKV().query_window(Budget(288, 1024 // 4, 32)) == 32
    assert InfoKV().query_window(Budget(288, 64, 0)) == 64
    assert InfoKV(queries=5).query_window(Budget(288, 64)) == 5
