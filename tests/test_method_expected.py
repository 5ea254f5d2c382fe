"""Expected Attention: the formula with one rotation matrix a position, and identities of its parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from digests import Past, rotating, unrotated, yarn
from formulas.expected import expected, rotation
from kvkeep.budget import Budget
from kvkeep.policies import ExpectedAttention, make_policy
from kvkeep.policies.expected import _mean_turn
from kvkeep.rotary import Rotary
from kvkeep.testing import Made, check_policy
from kvkeep.testing.fidelity import SHAPES


def reference_of(past: Past, **options: Any) -> Any:
    def reference(row: Any) -> Any:
        rotary = Made([9], width=row[0][0].queries.shape[-1]).rotary
        of = past.of[row[0][0].query_positions[-1] + 1]
        return expected(row, of, rotary.inv_freq.numpy(), rotary.scaling, **options)

    return reference


@pytest.mark.parametrize("options", [{}, {"covariance": False}, {"value_norm": False}, {"future": 1}, {"sinks": 0},
                                     {"sinks": 40, "epsilon": 0.01}])  # fmt: skip
def test_the_formula(options: dict[str, Any]) -> None:
    policy = ExpectedAttention(**options)
    past = Past(policy, pending=3, blocks=(20, 8))
    found = check_policy(policy, reference_of(past, **options), prepare=past)
    assert found.near <= found.compared / (200 if options.get("sinks") != 40 else 20)  # sinks tie, to the older one


@pytest.mark.parametrize("pairs", [4, 2])
def test_scaling_and_partial_rotation(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rotating(monkeypatch, lambda width: yarn(width, pairs))
    policy = ExpectedAttention()
    past = Past(policy, pending=2, blocks=(20, 8))
    found = check_policy(policy, reference_of(past), SHAPES[:1], prepare=past)
    assert found.near <= found.compared / 200


def test_candidates_among_the_sinks_outrank_all() -> None:
    policy = ExpectedAttention()
    past = Past(policy, pending=0, blocks=(20, 8))
    made = Made([40], protected=0)
    past(made)
    view = made.view()
    scores = policy.score(view)
    assert view.positions is not None
    sink = view.positions < 4
    assert sink.any()
    low = torch.where(sink, scores, torch.inf).amin(-1)
    assert (low > torch.where(sink, -torch.inf, scores).amax(-1)).all()


def test_one_and_the_same_query_is_plain_attention() -> None:
    """Without spread, and with one coming position, a key's score is the attention that the query would pay there."""
    policy = ExpectedAttention(future=1, sinks=0, value_norm=False)
    made = Made([50, 20], protected=0, window=1)
    rng = np.random.default_rng(0)
    q = rng.normal(size=(made.heads * made.group, made.width)).astype(np.float32)
    states = []
    for length in made.lengths:
        past = torch.from_numpy(q)[None, :, None].expand(-1, -1, length, -1)
        states.append(policy.digest(None, past, torch.arange(length)[None]))
    made.digest = [torch.cat(states)] * made.layers
    view = made.view()
    scores = policy.score(view)
    assert view.layer is not None
    for i in range(made.layers):
        layer = view.layer(i)
        now = torch.tensor(made.lengths)
        turned = made.rotary.rotate(torch.from_numpy(q)[None], now[:, None])[:, :, None]
        weights = layer.weights(layer.logits(turned, now[:, None])).mean(dim=(2, 3))
        wanted = layer.candidates(layer.ascending(weights))
        there = layer.there().expand_as(wanted)
        assert torch.allclose(scores[:, i][there], wanted[there], atol=1e-6)


def test_the_mean_rotation_is_the_mean_of_rotations() -> None:
    rotary = Rotary(torch.tensor([1.0, 0.3, 1e-3, 0.0], dtype=torch.float64), 0.8)
    starts = torch.tensor([0, 7, 60000])
    turns = _mean_turn(rotary, starts, 512)
    for start, turn in zip(starts.tolist(), turns, strict=True):
        matrices = [rotation(start + j, rotary.inv_freq.numpy(), 8, rotary.scaling) for j in range(512)]
        mean = sum(matrices) / 512
        assert np.allclose(turn.real, np.diag(mean)[:4], atol=1e-12)
        assert np.allclose(turn.imag, [mean[f + 4, f] for f in range(4)], atol=1e-12)


def test_digests_do_not_depend_on_blocks_and_survive_a_large_mean() -> None:
    policy, at = ExpectedAttention(), torch.arange(300)[None]
    queries = torch.randn(1, 2, 300, 8, generator=torch.Generator().manual_seed(0)) + 1000.0
    state, start = None, 0
    for size in (3, 2, 95, 200):
        state = policy.digest(state, queries[:, :, start : start + size], at[:, start : start + size])
        start += size
    assert state is not None
    assert state.shape == (1, 2, 10, 8)
    number, mean, products = state.split([1, 1, 8], dim=2)
    assert (number == 296).all()
    used = queries[:, :, 4:].double()
    assert torch.allclose(mean.double(), used.mean(2, keepdim=True), rtol=1e-6)
    apart = used - used.mean(2, keepdim=True)
    assert torch.allclose(products.double(), apart.transpose(-1, -2) @ apart, atol=0.05 * 296**0.5)


def test_a_ring_without_queries_of_a_short_row_does_not_count() -> None:
    """Positions before the first are empty places in the ring."""
    policy = ExpectedAttention(sinks=0)
    queries, at = torch.randn(1, 2, 5, 8), torch.arange(-2, 3)[None]
    found = policy.digest(None, queries, at)
    assert torch.allclose(found, policy.digest(None, queries[:, :, 2:], at[:, 2:]))


def test_helper_of_these_tests() -> None:
    rotary, x = yarn(8, 3), torch.randn(8)
    there = rotary.rotate(x, torch.tensor(11)).double().numpy()
    assert np.allclose(unrotated(there, 11, rotary), x.double().numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"future": 0}, "future must be a whole number of at least 1, got 0"),
        ({"future": True}, "future must be a whole number"),
        ({"sinks": -1}, "sinks must be a whole number of at least 0, got -1"),
        ({"covariance": 1}, "covariance must be true or false, got 1"),
        ({"value_norm": "yes"}, "value_norm must be true or false, got 'yes'"),
        ({"epsilon": -0.1}, "epsilon must be a number of at least 0"),
        ({"epsilon": float("nan")}, "epsilon must be a number of at least 0"),
    ],
)
def test_bad_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ExpectedAttention(**options)


def test_description() -> None:
    policy = make_policy("expected")
    assert policy == ExpectedAttention()
    assert policy.schedule(2048) == {}
    assert policy.query_window(Budget(2048, 512)) == policy.digest_blocks[1] == 64
