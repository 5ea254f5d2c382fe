"""VaSE-AttnV: what it reserves, how it draws the rest, and that nobody shares a draw."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from formulas.vase import gumbel, reserved, smoothed_attention, uniform, vase
from golden_views import gen, golden, layer_of
from kvkeep import Settings
from kvkeep.draws import apart, rank_keys, round_words, uniforms
from kvkeep.plan import eviction_order
from kvkeep.policies import VaSE, make_policy
from kvkeep.policies import vase as module
from kvkeep.signals import RoundView
from kvkeep.testing import Made, check_policy

P_MIN = 1e-4
#: More queries than tokens or than the window; nothing protected, so that sinks are candidates.
SHAPES: tuple[dict[str, Any], ...] = (
    {"lengths": [60, 9, 31]},
    {"lengths": [60, 12], "w": 20, "window": 2, "protected": 0},
    {"lengths": [90, 47], "heads": 1, "group": 4, "kept": 30, "protected": 2},
)


class Formula:
    """The formula with kvkeep's draws of seed 0 and round 0; told of each made-up round before it is shown."""

    def __init__(self, **options: Any) -> None:
        self.options, self.made = options, Made([9])

    def prepare(self, made: Made) -> None:
        self.made = made

    def __call__(self, row: Any) -> Any:
        number = next(i for i, other in enumerate(self.made.heads_of) if other is row)

        def noise(layer: int, head: int, column: int) -> float:
            return gumbel(1, 0, number * 7919 + 5, layer, head, 0, column)

        return vase(row, noise, len(row[0][0].cached) - 2, **self.options)


@pytest.mark.parametrize(
    "options",
    [{}, {"reserve": 0.0}, {"reserve": 0.5, "sinks": 0}, {"reserve": 1}, {"queries": 3}, {"kernel": 1, "sinks": 7}],
)
def test_formula(options: dict[str, Any]) -> None:
    formula = Formula(**options)
    found = check_policy(make_policy("vase", options), formula, SHAPES, prepare=formula.prepare)
    assert found.near <= found.compared // 50, found


@pytest.mark.parametrize("other", [{"reserve": 0.5}, {"sinks": 7}, {"queries": 1}, {"kernel": 1}])
def test_every_option_matters(other: dict[str, Any]) -> None:
    formula = Formula(**other)
    with pytest.raises(AssertionError, match="by the reference"):
        check_policy(VaSE(), formula, SHAPES, prepare=formula.prepare)


def test_golden() -> None:
    g = golden("vase")
    shape = (g["KV"], g["S"], g["D"])
    keys = gen(shape, 0.73, 0.1)
    values = gen(shape, 0.29, 0.5) * (1 + gen((*shape[:2], 1), 0.9, 0.2))
    layer = layer_of(keys, values, gen((g["H"], g["R"], g["D"]), 0.41, 0.3), window=0)
    close = partial(torch.testing.assert_close, rtol=0, atol=2e-6)
    assert layer.values is not None
    close((layer.values.amax(-1) - layer.values.amin(-1))[0], torch.tensor(g["value_range"]))
    close(VaSE().weights(layer)[0], torch.tensor(g["attn_smoothed"]))
    rank, count = VaSE().by_range(layer, torch.tensor([6]))
    kept = [(line >= g["S"] - 6).nonzero().flatten().tolist() for line in rank[0]]
    assert kept == g["reserved_6"]
    assert count.flatten().tolist() == [6, 6]


# ---- what always stays ---------------------------------------------------------------------------


def kept_of(made: Made, scores: Tensor, row: int, layer: int, head: int) -> set[int]:
    """Positions of candidates that stay when two entries go."""
    candidates = made.heads_of[row][layer][head].candidates
    ranked = sorted(range(len(candidates)), key=lambda c: (float(scores[row, layer, head, c]), c))
    return {candidates[c] for c in ranked[2:]}


@pytest.mark.parametrize("options", [{}, {"reserve": 0.0}, {"reserve": 0.6}, {"sinks": 9}, {"sinks": 0}])
def test_reserved_and_sinks_stay(options: dict[str, Any]) -> None:
    policy = VaSE(**options)
    for seed in range(20):
        made = Made([60, 31, 9], protected=seed % 3, seed=seed)
        scores = policy.score(made.view(seed=seed))
        for r, row in enumerate(made.heads_of):
            for i, layer in enumerate(row):
                for h, e in enumerate(layer):
                    kept, n = kept_of(made, scores, r, i, h), len(e.cached) - 2
                    first = set(reserved(e, n, policy.reserve, policy.sinks))
                    room = len(e.candidates) - 2
                    assert len(kept) == room
                    assert len(first) <= room or kept <= first
                    assert first <= kept or len(first) > room
                    assert {p for p in e.candidates if p < policy.sinks} <= kept or len(first) > room


def test_entries_without_weight_stay_by_their_range_alone() -> None:
    """Queries that see one key only leave the others nothing; they go first, the older ones before the newer."""
    made = Made([60], kept=30, protected=0, layers=1, heads=1, group=1, seed=2)
    e = made.heads_of[0][0][0]
    loud = e.candidates[15]
    e.queries[:] = 0.0
    e.queries[..., 0] = 1.0
    for p in e.cached:
        e.keys[p][0] = 400.0 if p == loud else -400.0
    weighty = {p for p in e.candidates if smoothed_attention(e, 64, 5)[p] > 1e-45}  # as float32 has it
    first = set(reserved(e, 28, 0.25, 4))
    assert 0 < len(weighty - first) < 6
    for seed in range(5):
        scores = VaSE().score(made.view(seed=seed))[0, 0, 0]
        assert bool(scores.isfinite().all())
        order = [p for _, p in sorted(zip(scores.tolist(), e.candidates, strict=True))]
        empty = [p for p in e.candidates if p not in weighty | first]
        assert order[: len(empty)] == empty
        assert set(order[-len(first) :]) == first


# ---- the draw ------------------------------------------------------------------------------------


def many(made: Made, rows: int, seed: int = 0) -> RoundView:
    """The first row of a round, ``rows`` times over, in streams of their own."""
    view = made.view(seed=seed)
    assert view.layer is not None
    layer = view.layer(0)

    def wide(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor.expand(rows, *tensor.shape[1:])

    names = ("keys", "positions", "filled", "window", "order", "places", "queries", "query_positions", "values")
    of_rows = replace(layer, **{name: wide(getattr(layer, name)) for name in (*names, "eligible")})
    return replace(
        view,
        streams=torch.arange(rows) * 31 + 1,
        rounds=torch.zeros(rows, dtype=torch.int64),
        positions=None,
        layer=lambda i: of_rows,
        kept=view.kept * rows,
        window=view.window * rows,
        seen=view.seen * rows,
    )


def small() -> Made:
    """Eight candidates of very unequal weight, of which two are reserved and three more can stay."""
    made = Made([40], kept=14, protected=2, window=4, layers=1, heads=1, group=1, seed=11)
    for p, vector in made.heads_of[0][0][0].keys.items():
        vector *= 1 + p % 3
    return made


def sets_of(scores: Tensor, kept: int) -> list[tuple[int, ...]]:
    """Columns that stay, row by row, as the planner chooses them."""
    width = scores.shape[-1]
    order = eviction_order(scores, [width] * len(scores))
    chosen = order.argsort(dim=-1)[:, 0, 0, width - kept :].sort(dim=-1).values
    return [tuple(line) for line in chosen.tolist()]


def goodness(scores: Tensor, weights: dict[int, float], fixed: set[int], drawn: int) -> float:
    """p of kept sets under successive draws in proportion to weight, chi-square over all sets."""
    chances: dict[tuple[int, ...], float] = {}
    for sequence in permutations(weights, drawn):
        left, chance = sum(weights.values()), 1.0
        for c in sequence:
            chance, left = chance * weights[c] / left, left - weights[c]
        key = tuple(sorted({*sequence, *fixed}))
        chances[key] = chances.get(key, 0.0) + chance
    assert math.isclose(sum(chances.values()), 1.0)
    counts = dict.fromkeys(chances, 0)
    for kept in sets_of(scores, drawn + len(fixed)):
        counts[kept] += 1  # KeyError: a reserved one is missing
    total = sum(counts.values())
    rare = [s for s in chances if chances[s] * total < 5]
    observed = [counts[s] for s in chances if s not in rare] + [sum(counts[s] for s in rare)]
    expected = [chances[s] * total for s in chances if s not in rare] + [sum(chances[s] for s in rare) * total]
    if not rare:
        observed, expected = observed[:-1], expected[:-1]
    return float(stats.chisquare(observed, expected).pvalue)


def draws(rows: int = 20_000, seed: int = 0, kept: int = 3) -> float:
    made = small()
    e = made.heads_of[0][0][0]
    first = {e.candidates.index(p) for p in reserved(e, 12, 0.2, 0)}
    attention = smoothed_attention(e, 64, 5)
    weights = {c: attention[p] for c, p in enumerate(e.candidates) if c not in first}
    assert (len(first), len(weights)) == (2, 6)
    assert max(weights.values()) > 4 * min(weights.values())
    return goodness(VaSE(reserve=0.2, sinks=0).score(many(made, rows, seed)), weights, first, kept)


@pytest.mark.parametrize("seed", range(4))
def test_draws_are_in_proportion_to_attention(seed: int) -> None:
    assert draws(seed=seed, kept=1 + seed) > P_MIN


def test_a_wrong_sampler_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights to the power 1.1, other noise, one draw for all: the same test says no."""
    weights = VaSE.weights
    with monkeypatch.context() as patch:
        patch.setattr(VaSE, "weights", lambda *args: weights(*args) ** 1.1)
        assert draws() < P_MIN / 100
    with monkeypatch.context() as patch:
        patch.setattr(module, "uniforms", lambda *args: uniforms(*args) * 0.9 + 0.05)
        assert draws() < P_MIN / 100
    with monkeypatch.context() as patch:
        patch.setattr(module, "uniforms", lambda words, ranks: uniforms(words.flatten()[:1], ranks))
        assert draws() < P_MIN / 100


def test_inclusion_of_many_candidates() -> None:
    """Sixty candidates: inclusion counts against numpy's own draws without replacement, z of each, none reserved."""
    made = Made([200], kept=70, protected=4, window=6, layers=1, heads=1, group=2, seed=5)
    e = made.heads_of[0][0][0]
    attention = smoothed_attention(e, 64, 5)
    weights = np.array([attention[p] for p in e.candidates])
    rng, n, drawn = np.random.default_rng(0), 20_000, 25
    noise = np.log(weights) - np.log(rng.exponential(size=(n, len(weights))))
    theirs = np.bincount(np.argsort(-noise, axis=-1)[:, :drawn].ravel(), minlength=len(weights))
    checked = [rng.choice(len(weights), drawn, replace=False, p=weights / weights.sum()) for _ in range(4000)]
    ours = np.bincount(np.array(sets_of(VaSE(reserve=0.0).score(many(made, n)), drawn)).ravel(), minlength=60)
    assert _largest_z(ours, n, theirs, n) < 4.5
    assert _largest_z(ours, n, np.bincount(np.array(checked).ravel(), minlength=60), 4000) < 4.5
    uniform_draws = np.bincount(rng.random((n, 60)).argsort(-1)[:, :drawn].ravel(), minlength=60)
    assert _largest_z(ours, n, uniform_draws, n) > 50


def _largest_z(a: np.ndarray, n: int, b: np.ndarray, m: int) -> float:
    p = (a + b) / (n + m)
    return float(np.abs((a / n - b / m) / np.sqrt(p * (1 - p) * (1 / n + 1 / m) + 1e-12)).max())


# ---- whose draw ----------------------------------------------------------------------------------


def noise_of(view: RoundView) -> Tensor:
    """The Gumbel noise in a view's scores, [R, L, H, C]: all weights alike, nothing reserved."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VaSE, "weights", lambda self, layer: torch.ones_like(layer.ascending(layer.keys[..., 0])))
        return VaSE(reserve=0.0, sinks=0).score(view)


def test_the_same_numbers_give_the_same_draw() -> None:
    made = Made([60, 31, 9])
    assert torch.equal(VaSE().score(made.view(seed=7, rounds=3)), VaSE().score(made.view(seed=7, rounds=3)))


def test_seed_stream_layer_head_and_round_each_change_the_draw() -> None:
    made = Made([400, 400], kept=300, layers=2, heads=2)
    drawn = [noise_of(made.view(seed=seed, rounds=number)) for seed, number in ((0, 0), (1, 0), (0, 1))]
    lines = torch.cat([d.reshape(8, -1) for d in drawn]).numpy()  # 24 of a seed, round, row, layer and head
    assert lines.shape == (24, 293)
    related = np.corrcoef(lines) - np.eye(24)
    assert np.abs(related).max() < 5 / math.sqrt(293)
    assert stats.kstest(lines.ravel(), stats.gumbel_r.cdf).pvalue > P_MIN


def test_heads_and_layers_have_their_global_numbers() -> None:
    """What tensor and pipeline parallel need: a part of the heads and layers draws what it draws in the whole."""
    made = Made([60])
    view = made.view()
    whole = noise_of(view)
    other = noise_of(replace(view, layers=view.layers + 1, heads=view.heads + 1))
    assert torch.equal(other[:, 0, 0], whole[:, 1, 1])
    assert not torch.equal(other[:, 0, 1], whole[:, 0, 1])


def test_draws_are_not_those_of_random() -> None:
    view = Made([900], kept=800, layers=1, heads=1).view()
    columns = torch.arange(view.candidates, dtype=torch.int32)
    words = round_words(view.seed, view.streams, view.layers, view.heads, view.rounds)
    random = rank_keys(words, columns)[0, 0, 0].numpy()
    found = stats.spearmanr(random, noise_of(view)[0, 0, 0].numpy())
    assert abs(found.statistic) < 5 / math.sqrt(len(columns))


def test_uniforms() -> None:
    """The same numbers from plain integers, strictly inside (0, 1) and uniform."""
    words = apart(round_words(3, torch.tensor([5, -9]), torch.arange(2), torch.arange(2), torch.tensor([0, 4])), 7)
    ranks = torch.arange(50_000, dtype=torch.int32)
    found = uniforms(words, ranks)
    assert found.dtype == torch.float32
    assert found.shape == (2, 2, 2, 50_000)
    for c in (0, 1, 49_999):
        assert float(found[1, 0, 1, c]) == uniform(7, 3, -9, 0, 1, 4, c)
    assert stats.kstest(found.flatten().numpy()[::7], "uniform").pvalue > P_MIN


@pytest.mark.parametrize(("key", "wanted"), [(0, 2.0**-24), (-1, 1 - 2.0**-24), (-(2**31), 0.5 + 2.0**-24)])
def test_uniforms_never_reach_0_or_1(key: int, wanted: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extreme bits give numbers whose logarithms are finite and not zero."""
    monkeypatch.setattr("kvkeep.draws.rank_keys", lambda words, ranks: torch.tensor([key], dtype=torch.int32))
    found = uniforms(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))
    assert float(found) == wanted
    assert bool((-(-found.log()).log()).isfinite())


# ---- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reserve": 2}, "reserve must be a number from 0 to 1, got 2"),
        ({"reserve": "a"}, "reserve must be a number"),
        ({"sinks": -1}, "sinks must be a whole number of at least 0"),
        ({"queries": 0}, "queries must be a whole number of at least 1"),
        ({"kernel": 2}, "kernel must be odd"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy("vase", options)


def test_schedule() -> None:
    budget = Settings("vase", budget=1024, **VaSE().schedule(1024)).make_budget()
    assert budget is not None
    assert (budget.total, budget.every, budget.window) == (1024, 64, 64)
    assert VaSE().query_window(budget) == 64
    assert VaSE.published_protection == "none"
    assert VaSE.default_protection == "prompt"
