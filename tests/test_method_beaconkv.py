"""BeaconKV: farthest point sampling and the score in plain loops, and identities of its parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from digests import Past, rotating, yarn
from formulas.beaconkv import beaconkv, beacons_of, sampled
from kvkeep.budget import Budget
from kvkeep.policies import BeaconKV, make_policy
from kvkeep.policies.beaconkv import farthest
from kvkeep.settings import Settings
from kvkeep.signals import DIGEST, ROTARY
from kvkeep.testing import Made, check_policy
from kvkeep.testing.fidelity import SHAPES


def reference_of(past: Past, recent: int, reduce: str = "max", beacons: int = 16) -> Any:
    def reference(row: Any) -> Any:
        rotary = Made([9], width=row[0][0].queries.shape[-1]).rotary
        length = row[0][0].query_positions[-1] + 1
        known = []
        for layer in past.of[length]:
            done, prompt = length - min(past.pending, len(row[0][0].query_positions)), past.prompt(length)
            trace = (past.blocks or past.policy.digest_blocks)[1]
            assert trace is not None
            known.append([padded(beacons_of(q[:done], prompt, trace, beacons, 20), beacons) for q in layer])
        return beaconkv(row, known, rotary.inv_freq.numpy(), rotary.scaling, recent, reduce)

    return reference


def padded(beacons: list[np.ndarray], count: int) -> list[np.ndarray]:
    return [beacons[i % len(beacons)] for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"recent": 3}, {"recent": 2, "beacons": 6}, {"reduce": "mean", "beacons": 3}])
def test_the_formula(options: dict[str, Any]) -> None:
    policy = BeaconKV(**options)
    # Rows of the default shapes are short: small blocks stand for the engine's.
    past = Past(policy, pending=2, blocks=(20, 5))
    values = {"recent": policy.recent, "reduce": policy.reduce, "beacons": policy.beacons}
    found = check_policy(policy, reference_of(past, **values), long(policy.beacons), prepare=past)
    assert found.near <= found.compared / 200


def long(beacons: int) -> list[dict[str, Any]]:
    """Shapes whose prompts give each head its beacons from the first block on, as the plain loops have it."""
    return [{**shape, "lengths": [max(n, 2 * beacons + 4) for n in shape["lengths"]]} for shape in SHAPES]


def test_scaling_and_partial_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    rotating(monkeypatch, lambda width: yarn(width, 3))
    policy = BeaconKV(beacons=4, recent=3)
    past = Past(policy, pending=1, blocks=(20, 3))
    values = {"recent": 3, "reduce": "max", "beacons": 4}
    found = check_policy(policy, reference_of(past, **values), SHAPES[:1], prepare=past)
    assert found.near <= found.compared / 200


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_without_beacons_the_newest_queries_vote(reduce: Any) -> None:
    policy = BeaconKV(beacons=0, recent=4, reduce=reduce)
    assert not {ROTARY, DIGEST} & policy.signals

    def reference(row: Any) -> Any:
        return beaconkv(row, None, np.zeros(0), recent=4, reduce=reduce)

    found = check_policy(policy, reference)
    assert found.near <= found.compared / 100

    made = Made([60, 9, 31])  # the same from attention itself
    view = made.view()
    assert view.layer is not None
    for i in range(made.layers):
        layer = view.layer(i)
        layer = replace(layer, queries=layer.queries[:, :, -4:], query_positions=layer.query_positions[:, -4:])  # type: ignore[index]
        votes = layer.attention()
        votes = votes.amax(dim=(2, 3)) if reduce == "max" else votes.mean(dim=(2, 3))
        there = layer.there()[:, 0, None].expand(-1, made.heads, -1)
        assert torch.allclose(policy.score(view)[:, i][there], layer.candidates(layer.ascending(votes))[there])


def test_the_mean_is_over_queries_that_exist() -> None:
    made = Made([40, 3], protected=0, window=1, w=5)
    view = made.view()
    assert view.layer is not None
    layer = view.layer(0)
    votes = layer.attention()[1:, :, :, 2:].mean(dim=(2, 3))  # the short row's three queries
    found = BeaconKV(beacons=0, recent=5, reduce="mean").score(view)[1:, 0, :, :2]
    short = replace(layer, order=layer.order[1:], places=layer.places[1:])
    assert torch.allclose(found, short.candidates(short.ascending(votes))[..., :2])


def test_a_beacon_that_is_the_newest_query_votes_as_it_does() -> None:
    made = Made([60, 31])
    bare = BeaconKV(beacons=0, recent=1).score(made.view())
    view = made.view()
    assert view.layer is not None
    made.digest = [view.layer(i).prerope()[:, :, -1:] for i in range(made.layers)]
    assert torch.allclose(BeaconKV(beacons=1, recent=1).score(made.view()), bare, atol=1e-6)


def test_beacons_stand_at_the_newest_position() -> None:
    """Entries that any cached query may see are seen by beacons too, wherever these came from."""
    made = Made([60])
    made.digest = [torch.randn(1, 6, 2, 8) for _ in range(made.layers)]
    policy = BeaconKV(beacons=2, recent=1)
    later = replace(made.view(), seen=(61,))
    assert not torch.allclose(policy.score(later), policy.score(made.view()), atol=1e-4)


# ---- farthest point sampling ----------------------------------------------------------------------


@pytest.mark.parametrize(("n", "count"), [(16, 16), (17, 16), (64, 16), (200, 5), (1, 1)])
def test_sampling_is_that_of_the_plain_loop(n: int, count: int) -> None:
    points = torch.randn(6, n, 8, generator=torch.Generator().manual_seed(n)) + 0.5
    found = farthest(points, count)
    for row, x in zip(found.tolist(), points.double().numpy(), strict=True):
        assert row == sampled(list(x), count)


def test_sampling_does_not_depend_on_the_order() -> None:
    points = torch.randn(4, 50, 8, generator=torch.Generator().manual_seed(1))
    order = torch.randperm(50, generator=torch.Generator().manual_seed(2))
    assert torch.equal(order[farthest(points[:, order], 12)], farthest(points, 12))


def test_ties_go_to_the_first_and_equal_points_are_chosen_last() -> None:
    e = torch.eye(4)
    assert farthest(e[None], 4).tolist() == [[0, 1, 2, 3]]
    points = torch.stack([e[0], e[0] * 3, e[1], e[0], e[2]])[None]
    assert farthest(points, 3).tolist() == [[2, 0, 4]]
    assert sorted(farthest(points, 5)[0].tolist()) == [0, 1, 2, 3, 4]  # never one twice


def test_short_prompts_repeat_queries_and_forget_the_copies() -> None:
    policy = BeaconKV(beacons=6, recent=4)
    few = torch.randn(1, 3, 2, 8, generator=torch.Generator().manual_seed(0))
    state = policy.digest(None, few, torch.arange(2)[None])
    assert torch.equal(state, few.repeat(1, 1, 3, 1))
    more = torch.randn(1, 3, 4, 8, generator=torch.Generator().manual_seed(1))
    state = policy.digest(state, more, torch.arange(2, 6)[None])
    everything = torch.cat([few, more], 2)
    for h in range(3):  # all six that exist, each once
        assert torch.equal(state[0, h].sort(0).values, everything[0, h].sort(0).values)


def test_the_digest_keeps_its_shape_and_its_rows_apart() -> None:
    policy = BeaconKV()
    queries = torch.randn(2, 4, 40, 8, generator=torch.Generator().manual_seed(0))
    at = torch.arange(40).expand(2, -1)
    state = policy.digest(None, queries[:, :, :24], at[:, :24])
    after = policy.digest(state, queries[:, :, 24:], at[:, 24:])
    assert state.shape == after.shape == (2, 4, 16, 8)
    alone = policy.digest(state[1:], queries[1:, :, 24:], at[1:, 24:])
    assert torch.equal(after[1:], alone)


# ---- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"beacons": -1}, "beacons must be a whole number of at least 0, got -1"),
        ({"beacons": 2000}, "beacons must be at most 1024, got 2000"),
        ({"recent": 0}, "recent must be a whole number of at least 1, got 0"),
        ({"recent": True}, "recent must be a whole number"),
        ({"reduce": "sum"}, "reduce must be max or mean, got 'sum'"),
    ],
)
def test_bad_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        BeaconKV(**options)


@pytest.mark.parametrize("total", [1792, 7168, 1000])
def test_the_schedule_drops_an_eighth(total: int) -> None:
    policy = make_policy("beaconkv", {"recent": 8})
    budget = Settings(policy="beaconkv", budget=total, **policy.schedule(total)).make_budget()
    assert budget is not None
    assert budget.window == 32
    assert budget.every / (budget.total + budget.every) == pytest.approx(1 / 8, abs=1e-3)
    assert policy.query_window(Budget(64, 8)) == policy.digest_blocks[1] == 8
    assert BeaconKV.digest_blocks == (1024, 16)
