"""VaSE-DKV: scores given the sketch, the sketch itself, and what always stays."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from formulas.vase import gaussian, vase_dkv
from golden_views import gen, golden, layer_of
from kvkeep import Settings
from kvkeep.policies import VaSEDKV, make_policy
from kvkeep.policies.vase import PURPOSE as OTHER
from kvkeep.policies.vase_dkv import PURPOSE
from kvkeep.signals import QUERIES
from kvkeep.testing import Made, check_policy

P_MIN = 1e-4
SHAPES: tuple[dict[str, Any], ...] = (
    {"lengths": [60, 9, 31]},
    {"lengths": [90, 47], "heads": 1, "group": 4, "kept": 30, "protected": 0, "width": 4},
)


class Formula:
    """The formula with kvkeep's sketches of seed 0 and round 0; told of each made-up round before it is shown."""

    def __init__(self, rank: int = 20, sinks: int = 4, purpose: int = PURPOSE) -> None:
        self.rank, self.sinks, self.purpose, self.made = rank, sinks, purpose, Made([9])

    def prepare(self, made: Made) -> None:
        self.made = made

    def __call__(self, row: Any) -> Any:
        number = next(i for i, other in enumerate(self.made.heads_of) if other is row)

        def sketch(layer: int) -> np.ndarray:
            return gaussian(self.purpose, 0, number * 7919 + 5, layer, 0, self.made.width, self.rank)

        return vase_dkv(row, sketch, self.sinks)


@pytest.mark.parametrize("options", [{}, {"rank": 3}, {"sinks": 0}, {"rank": 1, "sinks": 9}])
def test_formula(options: dict[str, Any]) -> None:
    formula = Formula(**options)
    found = check_policy(make_policy("vase-dkv", options), formula, SHAPES, prepare=formula.prepare)
    assert found.near <= found.compared // 50, found


@pytest.mark.parametrize("other", [{"rank": 19}, {"sinks": 9}, {"purpose": OTHER}])
def test_every_option_matters(other: dict[str, Any]) -> None:
    formula = Formula(**other)
    with pytest.raises(AssertionError, match="by the reference"):
        check_policy(VaSEDKV(), formula, SHAPES, prepare=formula.prepare)


def test_golden() -> None:
    g = golden("vase")
    shape = (g["KV"], g["S"], g["D"])
    keys, values = gen(shape, 0.73, 0.1), gen(shape, 0.29, 0.5) * (1 + gen((*shape[:2], 1), 0.9, 0.2))
    layer = layer_of(keys, values, gen((g["H"], g["R"], g["D"]), 0.41, 0.3), window=0)
    sketch = torch.from_numpy(gen((1, g["D"], 20), 0.17, 0.6)) / math.sqrt(20)
    scores = VaSEDKV().scores(layer, sketch)[0]
    torch.testing.assert_close(scores, torch.tensor(g["dkv_score"]), rtol=0, atol=2e-6)
    assert scores.topk(10, dim=-1).indices.sort(dim=-1).values.tolist() == g["dkv_keep_10"]


# ---- the sketch ----------------------------------------------------------------------------------


def sketch(words: Tensor, width: int = 64, rank: int = 20) -> np.ndarray:
    return VaSEDKV(rank).sketch(words, width).double().numpy()


def test_the_sketch_is_gaussian() -> None:
    """Normal with variance 1 / rank, its columns and rows unrelated; other words, another sketch."""
    words = torch.randint(-(2**63), 2**63 - 1, (200,), generator=torch.Generator().manual_seed(0))
    drawn = sketch(words)
    assert drawn.shape == (200, 64, 20)
    assert stats.kstest(drawn.ravel() * math.sqrt(20), "norm").pvalue > P_MIN
    assert stats.kstest(drawn.ravel() * math.sqrt(19), "norm").pvalue < P_MIN
    for lines in (drawn.reshape(200, -1), drawn.transpose(1, 0, 2).reshape(64, -1), drawn.transpose(2, 0, 1)):
        flat = lines.reshape(len(lines), -1)
        related = np.corrcoef(flat) - np.eye(len(flat))
        assert np.abs(related).max() < 6 / math.sqrt(flat.shape[1])


def test_lengths_are_right_on_average() -> None:
    """E |kG|^2 = |k|^2, so over many rounds a head ranks by |k|^2 |v|^2 times what chance adds to both alike."""
    vector = torch.randn(64, generator=torch.Generator().manual_seed(0)).double().numpy()
    words = torch.randint(-(2**63), 2**63 - 1, (4000,), generator=torch.Generator().manual_seed(1))
    lengths = ((vector @ sketch(words)) ** 2).sum(-1)
    off = (lengths.mean() - (vector**2).sum()) / (lengths.std() / math.sqrt(len(lengths)))
    assert abs(off) < 4.5


def sketches_of(made: Made, **values: Any) -> list[Tensor]:
    """The sketch each layer is scored with, [R, D, rank]."""
    seen: list[Tensor] = []
    view = made.view(**{k: values.pop(k) for k in ("seed", "rounds") if k in values})
    scores = VaSEDKV.scores

    def look(self: VaSEDKV, layer: Any, drawn: Tensor) -> Tensor:
        seen.append(drawn)
        return scores(self, layer, drawn)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VaSEDKV, "scores", look)
        VaSEDKV().score(replace(view, **values))
    return seen


def test_whose_sketch() -> None:
    """One for each row and layer, new at every round and seed, the same whichever heads are there."""
    made = Made([60, 60], layers=2, width=32)
    found = [sketches_of(made), sketches_of(made, seed=1), sketches_of(made, rounds=1)]
    lines = torch.stack([s for one in found for layer in one for s in layer]).flatten(1).double().numpy()
    assert lines.shape == (12, 640)
    assert np.abs(np.corrcoef(lines) - np.eye(12)).max() < 6 / math.sqrt(640)
    again = sketches_of(made, heads=torch.arange(2) + 6, layers=torch.tensor([1, 5]))
    assert torch.equal(again[0], found[0][1])
    assert all(torch.equal(a, b) for a, b in zip(found[0], sketches_of(made), strict=True))


# ---- what stays ----------------------------------------------------------------------------------


def test_sinks_stay_and_nothing_else_is_sure() -> None:
    made = Made([60], protected=0, kept=30, layers=1, heads=1, seed=4)
    e = made.heads_of[0][0][0]
    sinks = [p for p in e.candidates if p < 4]
    assert sinks
    best = set()
    for seed in range(30):
        scores = VaSEDKV().score(made.view(seed=seed))[0, 0, 0].tolist()
        ranked = sorted(e.candidates, key=lambda p: scores[e.candidates.index(p)])
        assert set(ranked[-len(sinks) :]) == set(sinks)
        best.add(frozenset(ranked[-10:]))
    assert len(best) > 5, "the sketch is not redrawn"


def test_scale_of_keys_or_values_changes_nothing() -> None:
    """Scores are shares of their head: longer keys of one head are no better for it."""
    made = Made([60, 31])
    before = VaSEDKV().score(made.view())
    for e in made.heads_of[0][1]:
        for p in e.cached:
            e.keys[p] *= 4.0
            e.values[p] *= 0.5
    torch.testing.assert_close(VaSEDKV().score(made.view()), before)


def test_values_of_another_width() -> None:
    view = Made([60], width=8, layers=1).view()
    layer = view.layer(0)  # type: ignore[misc]
    assert layer.values is not None
    narrow = replace(layer, values=layer.values[..., :4])
    assert bool(VaSEDKV().score(replace(view, layer=lambda i: narrow)).isfinite().all())


def test_options_and_schedule() -> None:
    for name in ("rank", "sinks"):
        with pytest.raises(ValueError, match=f"{name} must be a whole number"):
            make_policy("vase-dkv", {name: -1})
    with pytest.raises(ValueError, match="rank must be a whole number of at least 1, got 0"):
        make_policy("vase-dkv", {"rank": 0})
    make = partial(Settings, "vase-dkv", budget=1024)
    budget = make(**VaSEDKV().schedule(1024)).make_budget()
    assert budget is not None
    assert (budget.every, budget.window) == (64, 64)
    assert QUERIES not in VaSEDKV.signals
    assert VaSEDKV.published_protection == "none"
