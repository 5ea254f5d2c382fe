"""R-KV: importance, redundancy and their difference, on hand-made rounds and the golden vectors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from formulas.rkv import rkv
from golden_views import gen, golden, layer_of
from kvkeep import Settings
from kvkeep.policies import RKV, make_policy
from kvkeep.policies import rkv as module
from kvkeep.testing import Made, check_policy

#: More queries than a row has tokens, a window shorter than the queries, none at all.
LONG: tuple[dict[str, Any], ...] = (
    {"lengths": [60, 9, 12], "w": 12, "window": 2},
    {"lengths": [90, 47], "kept": 14, "protected": 0, "w": 40, "window": 1},
)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"lam": 0.5},
    {"lam": 0.9, "queries": 2, "kernel": 3},
    {"lam": 0.0},
    {"lam": 0.0, "threshold": 0.2},
    {"lam": 0.0, "variant": "paper"},
    {"lam": 0.1, "variant": "paper", "beta": 3, "threshold": 0.0},
    {"lam": 0.0, "threshold": 1.0},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_formula(options: dict[str, Any]) -> None:
    policy, formula = make_policy("rkv", options), partial(rkv, **options)
    for shapes in ({}, {"shapes": LONG}):
        found = check_policy(policy, formula, **shapes)
        assert found.near <= found.compared // 50, found


@pytest.mark.parametrize(
    "other",
    [{"lam": 0.5}, {"threshold": 0.2}, {"kernel": 1}, {"queries": 1}, {"variant": "paper"}],
)
def test_every_option_matters(other: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="by the reference"):
        check_policy(RKV(), partial(rkv, **other))


def test_beta_matters() -> None:
    with pytest.raises(AssertionError, match="by the reference"):
        check_policy(RKV(0.0, 0.1, variant="paper"), partial(rkv, lam=0.0, threshold=0.1, variant="paper", beta=2))


# ---- golden --------------------------------------------------------------------------------------


def test_golden() -> None:
    g = golden("rkv")
    shape = (g["KV"], g["S"], g["D"])
    keys, values = gen(shape, 0.73, 0.1) + np.float32(0.6), gen(shape, 0.29, 0.5)
    layer = layer_of(keys, values, gen((g["H"], g["window"], g["D"]), 0.41, 0.3), g["window"])
    policy = RKV(lam=0.1, kernel=7, threshold=0.5)
    past = g["S"] - g["window"]
    close = partial(torch.testing.assert_close, rtol=0, atol=2e-6)
    close(policy.importance(layer)[0, :, :past], torch.tensor(g["importance"]))
    close(policy.redundancy(layer)[0], torch.tensor(g["redundancy"]))
    final = policy._layer(layer)
    close(final[0], torch.tensor(g["final"]))
    kept = final[0].topk(g["budget"] - g["window"], dim=-1).indices.sort(dim=-1).values
    assert kept.tolist() == g["keep_past"]
    other = RKV(variant="paper", beta=2).redundancy(layer)[0]
    assert not torch.allclose(other, torch.tensor(g["redundancy"]), atol=1e-4), "two exemptions are not told from one"


# ---- identities ----------------------------------------------------------------------------------


def test_lam_1_is_attention_only() -> None:
    """Keys' likeness plays no part: adding a vector to all keys that no query sees changes nothing."""
    made = Made([60, 31], seed=3)
    for e in (e for row in made.heads_of for layer in row for e in layer):
        e.queries[..., 0] = 0.0
    attention, mixed = (RKV(lam).score(made.view()) for lam in (1.0, 0.1))
    for e in (e for row in made.heads_of for layer in row for e in layer):
        for p, key in e.keys.items():
            key[0] += 5.0 * (p % 3)
    assert torch.equal(attention, RKV(1.0).score(made.view()))
    assert not torch.allclose(mixed, RKV(0.1).score(made.view()))


def test_the_newest_copy_survives() -> None:
    """Each of four copies of a key spares the newest of the other three: 3, 3, 2 and 0 cosines of 1 remain."""
    made = Made([40], kept=20, protected=0, window=3, layers=1, heads=1, width=64)
    e = made.heads_of[0][0][0]
    rng, copies = np.random.default_rng(0), e.candidates[2:12:3]
    for p in e.cached:
        noise = rng.normal(size=64)
        e.keys[p] = np.ones(64) if p in copies else noise - noise.mean()  # at right angles to the copies
    scores = RKV(0.0).score(made.view())[0, 0, 0]
    ratios = (scores / scores[e.candidates.index(copies[-1])])[[e.candidates.index(p) for p in copies]]
    n = len(e.cached)  # redundancies are e^(3 / n), e^(3 / n), e^(2 / n) and 1, up to their sum
    assert ratios.tolist() == pytest.approx([np.exp(c / n) for c in (3, 3, 2, 0)], rel=1e-5)


def test_an_entry_that_nothing_resembles_spares_the_oldest() -> None:
    """The official code's accident: with no likeness at all, every row takes out its cosine with entry 0."""
    layer = Made([40], kept=20, layers=1).view().layer(0)  # type: ignore[misc]
    official, paper = (RKV(threshold=1.0, variant=v).redundancy(layer) for v in ("official", "paper"))  # type: ignore[arg-type]
    ratio = official / paper
    others = ratio[..., 1:20]  # divided by another sum, or not at all
    torch.testing.assert_close(others, others[..., :1].expand_as(others))
    assert float((ratio[..., 0] / others[..., 0] - 1).abs().min()) > 1e-3


# ---- tiles and batches ---------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that an operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


@contextmanager
def tiles(numbers: int, most: int = 256) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TILE", numbers)
        patch.setattr(module, "_MOST", most)
        yield


@pytest.mark.parametrize("policy", [RKV(0.0), RKV(0.0, 0.1, variant="paper", beta=2)])
def test_tiles_change_nothing_but_rounding(policy: RKV) -> None:
    made = Made([500, 90, 300], kept=211, layers=1)
    with tiles(1 << 24):
        expected = policy.score(made.view())
    for numbers, most in ((1, 256), (3 * 2 * 214 * 7, 256), (1 << 24, 100), (1 << 24, 1)):
        with tiles(numbers, most):
            torch.testing.assert_close(policy.score(made.view()), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("policy", [RKV(), RKV(variant="paper", beta=2)])
def test_cosines_are_never_all_there(policy: RKV) -> None:
    """At 1024 entries the largest tensor is a tile, an eighth of S x S here, or smaller."""
    made = Made([2000], kept=1024, layers=1, heads=2, width=4)
    view = made.view()
    slots = view.layer(0).keys.shape[2]  # type: ignore[misc]
    found = {}
    for rows in (128, 32):
        with tiles(1 << 24, rows), Largest() as seen:
            policy.score(view)
        found[rows] = seen.numbers
    assert found[128] == 2 * 128 * slots < 2 * slots**2 // 7
    assert found[32] == 2 * 32 * slots


def test_a_batch_holds_no_larger_tiles() -> None:
    view = Made([200] * 6, kept=100, layers=1, width=4).view()
    with tiles(40_000), Largest() as seen:
        RKV().score(view)
    assert seen.numbers <= 40_000


def test_rows_of_a_batch_are_their_own() -> None:
    """The authors' code takes the first row's keys for all; here only a row's own keys count."""
    made = Made([60, 60, 9], seed=1)
    before = RKV(0.0).score(made.view())
    for e in (e for layer in made.heads_of[0] for e in layer):
        for key in e.keys.values():
            key += 3.0
    after = RKV(0.0).score(made.view())
    assert torch.equal(before[1:], after[1:])
    assert not torch.allclose(before[0], after[0])


def test_keys_of_zero_and_half_precision() -> None:
    """A key without length resembles nothing; bfloat16 caches are scored in float32."""
    made = Made([40], layers=1)
    e = made.heads_of[0][0][0]
    e.keys[e.candidates[3]][:] = 0.0
    view = made.view()
    assert bool(RKV().score(view).isfinite().all())
    layer = view.layer(0)  # type: ignore[misc]
    assert layer.queries is not None
    half = replace(layer, keys=layer.keys.bfloat16(), queries=layer.queries.bfloat16())
    assert RKV().score(replace(view, layer=lambda i: half)).dtype == torch.float32


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lam": 1.5}, "lam must be a number from 0 to 1, got 1.5"),
        ({"lam": True}, "lam must be a number"),
        ({"threshold": -0.1}, "threshold must be a number from 0 to 1"),
        ({"kernel": 4}, "kernel must be odd"),
        ({"queries": 0}, "queries must be a whole number of at least 1"),
        ({"variant": "code"}, "variant must be official or paper"),
        ({"beta": 2}, "goes with variant='paper'"),
        ({"variant": "paper", "beta": 0}, "beta must be a whole number"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy("rkv", options)


def test_schedule() -> None:
    budget = Settings("rkv", budget=1024, **RKV().schedule(1024)).make_budget()
    assert budget is not None
    assert (budget.total, budget.every, budget.window) == (1024, 128, 8)
    assert RKV().query_window(budget) == 8
    assert RKV(queries=16).query_window(budget) == 16
    assert RKV().lam == 0.1
    assert RKV.published_protection == "none"
    assert RKV.default_protection == "prompt"
