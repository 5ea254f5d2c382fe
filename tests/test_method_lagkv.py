"""LagKV: chunks on the scale of the next chunk."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from formulas.lagkv import lagkv
from kvkeep import Settings
from kvkeep.plan import eviction_order
from kvkeep.policies import LagKV, make_policy
from kvkeep.testing import Made, check_policy


@pytest.mark.parametrize("lag", [4, 5, 11])
def test_formula(lag: int) -> None:
    found = check_policy(LagKV(lag), partial(lagkv, lag=lag))
    assert found.near <= found.compared // 50


def test_the_published_lag() -> None:
    """Rows of two, one and no scored chunk."""
    shape = {"lengths": [700, 300, 90], "kept": 400, "window": 20, "layers": 1, "heads": 1, "group": 1, "width": 16}
    found = check_policy(LagKV(), lagkv, [shape], seeds=1)
    assert found.compared > 500
    assert found.near <= found.compared // 50


def test_the_formula_can_fail() -> None:
    for lag in (3, 8):
        with pytest.raises(AssertionError, match="by the reference"):
            check_policy(LagKV(4), partial(lagkv, lag=lag))


def gone(made: Made, lag: int, victims: int) -> list[int]:
    """Positions that the first head of the only row loses."""
    e = made.heads_of[0][0][0]
    order = eviction_order(LagKV(lag).score(made.view()), [len(e.candidates)])[0, 0, 0].argsort()
    return sorted(e.candidates[i] for i in order[:victims].tolist())


def test_chunks_lose_the_same_share_and_the_last_whole_one_stays() -> None:
    """34 unprotected entries, 4 in the window: chunks of 5 from the first on; six, and four entries left over."""
    made = Made([37], kept=37, layers=1, heads=1)
    e = made.heads_of[0][0][0]
    assert len(e.candidates) == 30
    chunks = [e.candidates[i : i + 5] for i in range(0, 30, 5)]
    for victims in range(26):
        lost = [len(set(gone(made, 5, victims)) & set(chunk)) for chunk in chunks]
        assert lost[5] == 0
        assert sorted(lost[:5], reverse=True) == lost[:5]  # the older ones first, what is left over
        assert max(lost[:5]) - min(lost[:5]) <= 1
    assert gone(made, 5, 27) == e.candidates[:27]  # nothing else is left: the oldest of the rest


def test_fewer_than_two_chunks_are_recency() -> None:
    made = Made([37], kept=37, layers=1, heads=1)
    e = made.heads_of[0][0][0]
    assert gone(made, 18, 12) == e.candidates[:12]  # 34 entries beside the protected ones
    assert gone(made, 17, 12) != e.candidates[:12]
    assert gone(made, 128, 12) == e.candidates[:12]


def test_scale_and_shift_of_a_channel_do_not_matter() -> None:
    """Each channel is measured by its own range, so a new unit or origin changes nothing."""
    made = Made([60, 31])
    before = LagKV(4).score(made.view())
    for e in (e for row in made.heads_of for layer in row for e in layer):
        for states in (e.keys, e.values):
            states.update({p: 4 * x + 8 for p, x in states.items()})
    after = LagKV(4).score(made.view())
    for r, row in enumerate(made.heads_of):
        assert torch.equal(before[r, ..., : len(row[0][0].candidates)], after[r, ..., : len(row[0][0].candidates)])


def test_channels_that_never_move_tell_nothing() -> None:
    """The reference codes would divide by zero."""
    made = Made([60, 31])
    for e in (e for row in made.heads_of for layer in row for e in layer):
        for p in e.cached:
            e.keys[p][:3] = 0.0
            e.values[p][:] = 1.0
    assert bool(LagKV(4).score(made.view()).isfinite().all())
    expected = [lagkv(row, 4) for row in made.heads_of]
    scores = LagKV(4).score(made.view())
    for r, row in enumerate(made.heads_of):
        for i, layer in enumerate(row):
            for h, e in enumerate(layer):
                assert scores[r, i, h, : len(e.candidates)].tolist() == [expected[r][i][h][p] for p in e.candidates]


def test_options_and_schedule() -> None:
    budget = Settings("lagkv", budget=512, **LagKV().schedule(512)).make_budget()
    assert budget is not None
    assert (budget.every, budget.window) == (128, 128)
    assert LagKV.published_protection == "sinks:16"
    for bad in (1, True, 2.0):
        with pytest.raises(ValueError, match=f"lag must be a whole number of at least 2, got {bad}"):
            make_policy("lagkv", {"lag": bad})
