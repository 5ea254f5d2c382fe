"""Signals and scored policies: formulas on hand-made views, the ring of queries, and the tap on a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from kvkeep.budget import Budget
from kvkeep.hf.queries import QueryRing
from kvkeep.plan import eviction_order
from kvkeep.policies import Policy, make_policy
from kvkeep.signals import LayerView, RoundView
from models import prompt, step, tiny
from scored import FORMULAS, Count, Head
from small import evict

# ---- formulas on hand-made views ----------------------------------------------------------------

L, H, G, D, W = 2, 2, 3, 4, 5  # layers, KV heads, query heads of each, width, queries that vote


@dataclass
class Made:
    """Rows of random keys and queries by position; views of what is left of them, in slots of any order."""

    lengths: list[int]
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        rows = len(self.lengths)
        self.keys = self.rng.normal(size=(rows, L, H, 200, D)).astype(np.float32)
        self.queries = self.rng.normal(size=(rows, L, H, G, 200, D)).astype(np.float32) * 2
        self.held = [[[set(range(n)) for _ in range(H)] for _ in range(L)] for n in self.lengths]

    def layer(self, number: int, protected: int, window: int, w: int, scaling: float | None) -> LayerView:
        """Protected positions lie in the first slots, the newest in the last, as in a cache; the rest is shuffled."""
        rows, N = len(self.lengths), max(len(row[0][0]) for row in self.held) + 3
        positions = self.rng.integers(0, 200, size=(rows, H, N))  # rubbish where there is no entry
        keys = self.rng.normal(size=(rows, H, N, D)).astype(np.float32) * 9
        counts = [len(row[0][0]) for row in self.held]
        for i, count in enumerate(counts):
            for h in range(H):
                line = np.array(sorted(self.held[i][number][h]))
                self.rng.shuffle(line[protected : count - window])
                positions[i, h, :count] = line
                keys[i, h, :count] = self.keys[i, number, h, line]
        slots = torch.arange(N)
        cached = torch.tensor(counts)[:, None, None]
        filled = slots < cached
        there = torch.from_numpy(positions).masked_fill(~filled, 10**6)
        order = torch.from_numpy(np.argsort(there.numpy(), axis=-1, kind="stable"))
        wide = max(counts) - protected - window
        places = (protected + torch.arange(wide)).expand(rows, H, wide)
        ring = np.zeros((rows, H * G, w, D), dtype=np.float32)
        for i, n in enumerate(self.lengths):
            for j, t in enumerate(range(n - w, n)):
                ring[i, :, j] = self.queries[i, number, :, :, t].reshape(H * G, D) if t >= 0 else 0
        at = torch.tensor(self.lengths)[:, None] + torch.arange(-w, 0)
        window_slots = filled & (slots >= cached - window)
        return LayerView(torch.from_numpy(keys), torch.from_numpy(positions).int(), filled, window_slots, order, places,
                         torch.from_numpy(ring), at, scaling)  # fmt: skip

    def view(self, *args: Any) -> RoundView:
        rows = len(self.lengths)
        zeros = torch.zeros(rows, dtype=torch.int64)
        wide = max(len(row[0][0]) for row in self.held) - args[0] - args[1]
        layers = [self.layer(number, *args) for number in range(L)]
        return RoundView(0, zeros, zeros, torch.arange(L), torch.arange(H), H, wide, layer=lambda i: layers[i])


@pytest.mark.parametrize("name", list(FORMULAS))
def test_scores_follow_their_formula(name: str) -> None:
    """Six rounds of rows with different fill, gaps and slots; one row is shorter than the queries' window."""
    made, total = Made([3, 17, 11, 30], seed=len(name)), Count()
    policy = make_policy("", {}) if not name else make_policy(**_call(FORMULAS[name][0]))
    w = policy.query_window(Budget(12, W)) if isinstance(policy, Policy) else W
    protected, window, victims = 2, 3, 4
    for number in range(6):
        made.lengths = [n + 5 for n in made.lengths]
        for i, n in enumerate(made.lengths):
            for heads in made.held[i]:
                for held in heads:
                    held |= set(range(n - 5, n))
        scaling = 0.3 if number % 2 else None
        scores = policy.score(made.view(protected, window, w, scaling))
        assert scores.dtype == torch.float32
        assert scores.shape[:3] == (4, L, H)
        for i, n in enumerate(made.lengths):
            for layer in range(L):
                for h in range(H):
                    held = made.held[i][layer][h]
                    line = sorted(held)
                    candidates, newest = line[protected : len(line) - window], set(line[len(line) - window :])
                    keys = dict(enumerate(made.keys[i, layer, h].astype(np.float64)))
                    queries = dict(enumerate(made.queries[i, layer, h].astype(np.float64).swapaxes(0, 1)))
                    scale = D**-0.5 if scaling is None else scaling
                    wanted = FORMULAS[name][1](Head(keys, queries, line, newest, range(n - w, n), scale))
                    found = scores[i, layer, h, : len(candidates)].tolist()
                    assert found == pytest.approx([wanted[p] for p in candidates], rel=1e-4, abs=1e-6)
                    order = sorted(zip(found, candidates, strict=True))
                    gone = {p for _, p in order[:victims]}
                    total.compare(gone, wanted, candidates)
                    held -= gone
    assert total.rounds == 6 * 4 * L * H
    assert total.near <= 2


def _call(values: dict[str, Any]) -> dict[str, Any]:
    return {"name": values["policy"], "options": {k: v for k, v in values.items() if k != "policy"}}


@pytest.mark.parametrize("name", ["snapkv", "snapkv-paper", "keydiff", "knorm"])
def test_slots_mean_nothing(name: str) -> None:
    """Any permutation of the slots, with rubbish in the empty ones, gives the same scores."""
    policy = make_policy(**_call(FORMULAS[name][0]))
    made = Made([9, 20])
    views = [made.view(2, 3, 6, None) for _ in range(2)]  # shuffled anew
    a, b = (policy.score(view) for view in views)
    assert not torch.equal(views[0].layer(0).positions, views[1].layer(0).positions)  # type: ignore[misc]
    for i, n in enumerate([4, 15]):
        assert torch.allclose(a[i, ..., :n], b[i, ..., :n], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["snapkv-plain", "keydiff", "knorm"])
def test_equal_scores_go_by_position(name: str) -> None:
    """Keys that are all alike: the oldest candidates go, wherever they lie."""
    policy, made = make_policy(**_call(FORMULAS[name][0])), Made([20])
    made.keys[:] = 0.5
    view = made.view(2, 6, 6, None)
    order = eviction_order(policy.score(view), [12])
    assert torch.equal(order.argsort(-1), torch.arange(12).expand_as(order))


def test_a_query_that_sees_nothing_has_no_vote() -> None:
    """More queries than entries: what the oldest ones saw is gone. Softmax over nothing would be NaN."""
    made = Made([40])
    for heads in made.held[0]:
        heads[0] -= set(range(30))
        heads[1] -= set(range(20, 30))
        heads[1] -= set(range(20))
    layer = made.layer(0, 0, 4, 20, None)
    weights = layer.attention()
    assert weights.shape == (1, H, G, 20, 13)
    assert torch.equal(weights.sum(-1)[0, 0, 0].round(decimals=5), torch.tensor([0.0] * 10 + [1.0] * 10))
    scores = make_policy("snapkv", {"queries": 20}).score(made.view(0, 4, 20, None))
    assert bool(scores.isfinite().all())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"queries": -1}, "queries must be a whole number of at least 0, got -1"),
        ({"queries": "8"}, "queries must be a whole number of at least 0, got '8'"),
        ({"kernel": 0}, "kernel must be a whole number of at least 1, got 0"),
        ({"kernel": 4}, "kernel must be odd, got 4"),
        ({"kernel": "5"}, "kernel must be a whole number of at least 1, got '5'"),
        ({"pool": "mean"}, "pool is avg or max and group mean or max, got 'mean' and 'mean'"),
        ({"group": "sum"}, "got 'avg' and 'sum'"),
    ],
)
def test_bad_options_of_snapkv(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_policy("snapkv", options)


def test_windows_of_queries() -> None:
    assert make_policy("snapkv").query_window(Budget(32, 8)) == 8
    assert make_policy("snapkv").query_window(Budget(32, 8, 0)) == 8
    assert make_policy("snapkv").query_window(Budget(32, 8, 12)) == 12
    assert make_policy("snapkv", {"queries": 3}).query_window(Budget(32, 8)) == 3
    assert Policy().query_window(Budget(32, 8, 0)) == 8  # a ring of none could hold nothing


def test_signals_that_were_not_asked_for() -> None:
    made = Made([9])
    layer = replace(made.layer(0, 2, 3, 6, None), queries=None)
    with pytest.raises(ValueError, match="'queries': add it to the policy's signals"):
        layer.attention()
    view = replace(made.view(2, 3, 6, None), layer=None)
    with pytest.raises(ValueError, match="'keys' or 'queries': add it to the policy's signals"):
        make_policy("knorm").score(view)


# ---- the ring -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[1] * 23, [7, 1, 1, 9, 2, 3], [23], [5, 5, 5, 5, 3], [4, 6, 13]])
def test_the_ring_holds_the_newest(sizes: list[int]) -> None:
    """Forwards of any size, also longer than the ring; rows that were selected; oldest first."""
    everything = torch.randn(3, 4, 23, 2, generator=torch.Generator().manual_seed(0))
    for window in (1, 5, 30):
        ring, at, order = QueryRing(window), 0, [0, 1, 2]
        for number, size in enumerate(sizes):
            ring.add(7, everything[order][:, :, at : at + size], at, 0.5)
            at += size
            if number == 1:
                ring.select([2, 0])
                order = [order[2], order[0]]
            found = ring.get(7, range(len(order)), at)
            first = max(0, at - window)
            assert torch.equal(found[:, :, window - at + first :], everything[order][:, :, first:at])
            assert not found[:, :, : window - at + first].any()
            assert torch.equal(ring.get(7, [1], at), found[1:2])
        assert ring.nbytes == len(order) * 4 * window * 2 * 4
        assert ring.scaling == {7: 0.5}


def test_bytes_of_the_ring() -> None:
    """3 layers, 4 query heads, 4 queries of 8 float32 a row: counted under policy, from the first forward on."""
    model, ids = tiny("llama"), prompt(40, seed=4)
    for name, size in (("snapkv", 3 * 4 * 4 * 8 * 4), ("knorm", 0)):
        with evict(model, name) as cache:
            step(model, cache, ids[:, :11])
            first = cache.stats()["bytes"]
            assert first["policy"] == size
            for t in range(11, 40):
                step(model, cache, ids[:, t : t + 1])
            found = cache.stats()["bytes"]
            moves = sum(t.untyped_storage().nbytes() for m in cache._rounds._ahead.values() for t in (m.src, m.dst))
            assert found["policy"] == size + moves
            assert found["now"] == found["entries"] + found["positions"] + found["policy"] <= found["peak"]
            assert cache.stats()["rounds"] == [3]
            cache.reset()
            assert cache.stats()["bytes"]["policy"] == 0
