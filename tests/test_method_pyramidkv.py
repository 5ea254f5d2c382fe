"""PyramidKV: SnapKV's scores, budgets that decrease from layer to layer."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from formulas.pyramidkv import budgets
from formulas.snapkv import snapkv
from kvkeep.budget import split
from kvkeep.policies import PyramidKV, SnapKV, make_policy
from kvkeep.signals import LayerView, RoundView
from kvkeep.testing import Made, check_policy


def view(layers: int, rows: list[tuple[int, int, int]]) -> RoundView:
    """Rows of (kept after the round, entries that stay anyway, candidates): all that the budgets depend on."""
    at = torch.arange(max(stay + there for _, stay, there in rows))
    stay, count = (torch.tensor(x)[:, None, None] for x in ([r[1] for r in rows], [r[1] + r[2] for r in rows]))
    filled, eligible = at < count, (at >= stay) & (at < count)
    nothing = torch.zeros(len(rows), 1, len(at))
    layer = LayerView(nothing[..., None], nothing.int(), filled, filled & ~eligible, nothing.long(), nothing.long(),
                      eligible=eligible)  # fmt: skip
    zeros = torch.zeros(len(rows), dtype=torch.int64)
    heads = torch.arange(1)
    return RoundView(0, zeros, zeros, torch.arange(layers), heads, 1, len(at), layer=lambda i: layer,
                     kept=tuple(r[0] for r in rows))  # fmt: skip


def allot(policy: PyramidKV, layers: int, rows: list[tuple[int, int, int]]) -> Tensor:
    found = policy.allot(view(layers, rows), torch.zeros(len(rows), layers, 1, 1))
    assert found.dtype == torch.float64
    assert found.shape == (len(rows), layers)
    return found


@given(
    layers=st.integers(1, 80),
    rows=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 500), st.integers(1, 9000)), min_size=1, max_size=4),
    beta=st.one_of(st.just(20.0), st.floats(1, 1000)),
)
@settings(max_examples=300, deadline=None)
def test_budgets(layers: int, rows: list[tuple[int, int, int]], beta: float) -> None:
    """The sum is L times the mean; no layer gets more than the one before; nobody is asked for more than there is."""
    rows = [(free + stay, stay, there) for free, stay, there in rows]
    for (kept, stay, there), found in zip(rows, allot(PyramidKV(beta=beta), layers, rows).tolist(), strict=True):
        assert sum(found) == pytest.approx(layers * kept, rel=1e-12)
        assert all(a >= b - 1e-9 for a, b in pairwise(found))
        assert found[-1] >= stay - 1e-9
        expected = [stay + b for b in budgets(kept - stay, there, layers, beta)]
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
        if there <= kept - stay:
            assert found == [kept] * layers
        else:
            assert max(found) <= stay + there + 1e-9
            whole = split(found, layers * kept, stay, [stay + there] * layers)
            assert sum(whole) == layers * kept
            assert all(a >= b for a, b in pairwise(whole))
            assert all(abs(a - b) < 1 + 1e-6 for a, b in zip(found, whole, strict=True))


def test_as_published() -> None:
    """C = 128, w = 8, 32 layers, a long prompt: 120 / 20 = 6 and 234 beside the window. A short one: capped."""
    long, short = allot(PyramidKV(), 32, [(128, 8, 4000), (128, 8, 200)]).tolist()
    assert (long[0], long[-1]) == pytest.approx((242, 14))
    assert (short[0], short[-1]) == pytest.approx((208, 48))
    assert allot(PyramidKV(beta=1), 32, [(128, 8, 4000)]).tolist() == [[128.0] * 32]
    assert allot(PyramidKV(), 1, [(128, 8, 4000)]).tolist() == [[128.0]]


def test_the_pyramid_grows_over_rounds() -> None:
    """K = 200, r = 10, 5 of prompt and window: after each round all layers cache r more; at last it is as steep as
    after one compression of a long prompt, and the total was L K after every round."""
    layers, kept, every, stay = 8, 200, 10, 5
    held = [kept + every] * layers
    tops = []
    for _ in range(40):
        # What matters is the first layer, which holds most.
        wanted = allot(PyramidKV(), layers, [(kept, stay, held[0] - stay)])[0].tolist()
        left = split(wanted, layers * kept, stay, held)
        assert sum(left) == layers * kept
        assert all(a >= b for a, b in pairwise(left))
        tops.append(left[0])
        held = [n + every for n in left]
    assert tops[:3] == [210, 220, 230]
    goal = [stay + b for b in budgets(kept - stay, 10**6, layers)]
    assert max(abs(a - b) for a, b in zip(left, goal, strict=True)) < 1


def test_a_view_of_the_whole_round() -> None:
    """Rows of different fill, as an engine shows them: protected ones and the window count for every layer."""
    made = Made([60, 9, 31], layers=3)
    shown = made.view()
    found = PyramidKV().allot(shown, PyramidKV().score(shown)).tolist()
    for wanted, row, kept in zip(found, made.heads_of, shown.kept, strict=True):
        e = row[0][0]
        stay = len(e.cached) - len(e.candidates)
        assert wanted == pytest.approx([stay + b for b in budgets(kept - stay, len(e.candidates), 3)])


@pytest.mark.parametrize("options", [{}, {"kernel": 7, "pool": "max", "group": "max", "reduce": "sum"}])
def test_scores_are_those_of_snapkv(options: dict[str, Any]) -> None:
    found = check_policy(PyramidKV(**options), partial(snapkv, **options))
    assert found.near <= found.compared // 50
    shown = Made([60, 31]).view()
    assert torch.equal(PyramidKV(**options).score(shown), SnapKV(**options).score(shown))


def test_options() -> None:
    assert PyramidKV().splits
    assert not SnapKV().splits
    assert PyramidKV().schedule(512) == {}
    for options, says in (
        ({"beta": 0.5}, "beta must be a number of at least 1 .*, got 0.5"),
        ({"beta": True}, "got True"),
        ({"beta": float("nan")}, "got nan"),
        ({"beta": "20"}, "got '20'"),
        ({"kernel": 4}, "kernel must be odd"),
    ):
        with pytest.raises(ValueError, match=says):
            make_policy("pyramidkv", options)
