"""Scored policies and probes use the draws' plan: ties, signs and masks must not bend it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from checks import check_event
from kvkeep.budget import Budget
from kvkeep.layout import Round
from kvkeep.plan import Overrides, plan
from kvkeep.policies import Policy, RandomAttention
from kvkeep.policies.base import PolicyScope
from kvkeep.protection import Protection
from kvkeep.signals import POSITIONS, RoundView
from reference import Slots, uniform_inclusion

PROMPT = Protection.parse("prompt")


def survivors(scores: list[float], victims: int, overrides: Overrides | None = None) -> list[int]:
    """Ranks that remain of one head's candidates."""
    moves = plan(torch.tensor(scores).view(1, 1, 1, -1), [Round(0, 0, len(scores), victims, 0)], overrides=overrides)
    slots = torch.arange(len(scores)).view(1, 1, 1, -1)
    after = slots.scatter(-1, moves.dst, slots.gather(-1, moves.src))
    return sorted(after[0, 0, 0, : len(scores) - victims].tolist())


def test_lowest_scores_go() -> None:
    inf = float("inf")
    assert survivors([-1.0, 2.0, -3.0, 0.5, -0.25, 7.0], 3) == [1, 3, 5]
    assert survivors([-1.0, -3.0, -0.5, -2.0], 2) == [0, 2]
    assert survivors([-inf, 1.0, inf, -1e38, 1e38, 1e-45], 3) == [1, 2, 4]
    assert survivors([1e-45, 0.0, -1e-45], 1) == [0, 1]  # denormals keep their order
    assert survivors([1.0, 1.0 + 2**-23, 1.0 - 2**-24], 2) == [1]  # no bit of a score is lost


def test_ties_go_by_rank() -> None:
    """Equal scores must not depend on the device's topk: the lowest rank goes first."""
    assert survivors([5.0] * 8, 3) == [3, 4, 5, 6, 7]
    assert survivors([-2.0] * 8, 3) == [3, 4, 5, 6, 7]
    assert survivors([1.0, 0.0, 1.0, 0.0, 0.0, 1.0], 2) == [0, 2, 4, 5]


def test_negative_zero_is_zero() -> None:
    """-0.0 sorts below 0.0 as bits; as scores they tie, and rank decides."""
    assert survivors([0.0, -0.0, 0.0, -0.0], 1) == [1, 2, 3]
    assert survivors([-0.0, 0.0, -0.0, 0.0], 2) == [2, 3]


@pytest.mark.parametrize("width", [1000, 5000])
def test_many_ties_of_a_wide_head(width: int) -> None:
    """Real pools are thousands wide with bf16-coarse scores; checked against Python's stable sort."""
    scores = torch.randint(-20, 20, (width,), generator=torch.Generator().manual_seed(0)).float() / 4
    order = sorted(range(width), key=lambda c: (float(scores[c]), c))
    assert survivors(scores.tolist(), 64) == sorted(order[64:])


@dataclass(frozen=True)
class Wave(Policy):
    """A score of the position alone, with ties and both signs."""

    shared: PolicyScope = "head"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS})

    @property
    def scope(self) -> PolicyScope:
        return self.shared

    def score(self, view: RoundView) -> Tensor:
        assert view.positions is not None
        L, H = view.positions.shape[1:3]
        per_head = 3 * torch.arange(L).view(1, L, 1, 1) + torch.arange(H).view(1, 1, H, 1)
        return wave(view.positions.long(), per_head)


def wave(p: Tensor, head: Tensor | int) -> Tensor:
    return ((p * 7 + head * 5) % 13 - 6).float()


@pytest.mark.parametrize("scope", ["head", "layer", "model"])
def test_scores_of_positions_reach_the_right_entries(scope: PolicyScope) -> None:
    """Candidates come by position while slots are shuffled: each head must keep what its own scores say."""
    budget = Budget(14, 5, 3)
    slots = Slots(Wave(scope), budget, PROMPT, [2, 5], [0, 0], L=2, H=1 if scope != "head" else 2)
    slots.watch = check_event
    heads = {(i, layer, h): list(range(n)) for i, n in enumerate([2, 5]) for layer in range(2) for h in range(slots.H)}
    for _ in range(60):
        for (i, layer, h), held in heads.items():
            row = slots.rows[i]
            if len(held) == 19:
                tail = held[2 if i == 0 else 5 : -3]
                shared = {"head": 3 * layer + h, "layer": 3 * layer, "model": 0}[scope]
                worst = sorted(tail, key=lambda p: (float(wave(torch.tensor(p), shared)), p))[:5]
                held[:] = [p for p in held if p not in worst]
            held.append(row.seen)
        slots.trace(1)
        for (i, layer, h), held in heads.items():
            assert sorted(slots.kept(i)[layer, h].tolist()) == held


# ---- masks of probes --------------------------------------------------------------------------


def test_kept_entries_never_go_and_forgotten_ones_go_first() -> None:
    """Over many rounds, for some heads only, in rows of unequal length."""

    def masks(at: Tensor) -> Overrides:
        keep, forget = torch.zeros_like(at, dtype=torch.bool), torch.zeros_like(at, dtype=torch.bool)
        keep[:, 0, 0] = at[:, 0, 0] == 9
        keep[:, 1] = (at[:, 1] == 10) | (at[:, 1] == 31)
        forget[:, :, 1] = (at[:, :, 1] % 8 == 3) | (at[:, :, 1] == 10)
        return Overrides(keep, forget)

    slots = Slots(RandomAttention(), Budget(24, 4), PROMPT, [5, 8, 0], [1, 2, 3], L=2, H=2, masks=masks)
    for _ in range(120):
        slots.trace(1)
        for i, row in enumerate(slots.rows):
            if not row.rounds:
                continue
            got = [[set(head) for head in layer] for layer in slots.kept(i).tolist()]
            entered = row.seen - 8  # older tokens have certainly been candidates
            assert 9 in got[0][0]
            assert 10 in got[1][0]
            assert 10 in got[1][1]  # keep outranks forget
            if entered > 31:
                assert 31 in got[1][0]
                assert 31 in got[1][1]
            gone = {p for p in range(row.protected, entered) if p % 8 == 3} - {31}
            assert not gone & got[0][1]
            assert not gone & got[1][1]


def test_masks_leave_other_heads_alone() -> None:
    """A probe of one head must not change what another keeps, bit for bit."""

    def masks(at: Tensor) -> Overrides:
        keep = torch.zeros_like(at, dtype=torch.bool)
        keep[:, 0, 0] = at[:, 0, 0] == 9
        return Overrides(keep=keep)

    plain, probed = (
        Slots(RandomAttention(), Budget(24, 4), PROMPT, [5, 8], [1, 2], L=2, H=2, masks=m) for m in (None, masks)
    )
    plain.trace(150)
    probed.trace(150)
    for i in range(2):
        a, b = plain.kept(i), probed.kept(i)
        assert torch.equal(a[1], b[1])
        assert torch.equal(a[0, 1], b[0, 1])
        assert not torch.equal(a[0, 0], b[0, 0])


def test_everything_else_stays_uniform() -> None:
    """Beside one kept and two forgotten entries, the other victims are a fair draw."""
    heads, C, r = 20_000, 20, 6
    slots = Slots(RandomAttention(), Budget(24, r, r), PROMPT, [4], [3], 1, heads)
    slots.masks = lambda at: Overrides(keep=at == 11, forget=(at == 6) | (at == 19))
    slots.rounds(1)
    gone = heads - np.array([int((slots.kept() == p).any(-1).sum()) for p in range(4, 4 + C)])
    counts = dict(zip(range(4, 4 + C), gone, strict=True))
    assert (counts.pop(11), counts.pop(6), counts.pop(19)) == (0, heads, heads)
    assert uniform_inclusion(np.array(list(counts.values())), heads, r - 2) > 1e-4


def test_too_many_kept_entries_still_leave_exactly_k() -> None:
    """Masks outrank the policy, not the budget, also in rows that are padded to the width of another."""
    half = Protection.parse("prompt:0.5")
    slots = Slots(RandomAttention(), Budget(12, 4, scope="trace"), half, [4, 20], [3, 4], 1, 3)
    slots.masks = lambda at: Overrides(keep=at >= 0)
    widths = []
    slots.watch = lambda self, which, events, *rest: widths.append([e.candidates for e in events])
    for _ in range(5):
        slots.rounds(1)
        for i, (prefix, kept) in enumerate([(2, 16), (10, 32)]):
            for head in slots.kept(i)[0].tolist():
                assert len(set(head)) == kept
                assert head[:prefix] == list(range(prefix))
                assert set(range(slots.rows[i].seen - 4, slots.rows[i].seen)) <= set(head)
    assert widths == [[14, 22]] * 5


def test_masks_apply_to_scores_too() -> None:
    keep, forget = (torch.tensor(m).view(1, 1, 1, -1) for m in ([1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 1]))
    scores = [-float("inf"), 1.0, -2.0, 3.0, 0.0, float("inf")]
    assert survivors(scores, 2, Overrides(keep.bool(), forget.bool())) == [0, 1, 3, 4]
