"""What makes a round cheap changes nothing: numpy for torch, one bound for topk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep import cpu, draws, positions
from kvkeep.layout import Round
from kvkeep.plan import plan

WORDS = st.integers(-(2**63), 2**63 - 1)


@settings(deadline=None, max_examples=50)
@given(
    st.integers(-(2**70), 2**70), st.lists(WORDS, min_size=1, max_size=3), st.integers(0, 2**40), st.integers(1, 700)
)
def test_draws_have_the_same_bits_in_numpy_and_torch(seed: int, streams: list[int], number: int, width: int) -> None:
    arguments = (
        seed,
        torch.tensor(streams),
        torch.tensor([0, 3, 61]),
        torch.arange(2),
        torch.arange(number, number + len(streams)),
    )
    words = cpu.round_words(*arguments)
    assert torch.equal(words, draws._round_words(*arguments))
    ranks = torch.arange(width, dtype=torch.int32)
    assert torch.equal(cpu.rank_keys(words, ranks), draws._rank_keys(words, ranks))


def test_keys_are_the_same_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    words, ranks = torch.arange(7).view(1, 7, 1) * -(2**60), torch.arange(300, dtype=torch.int32)
    whole = draws._rank_keys(words, ranks)
    for block in (1, 299, 650, 10**6):
        monkeypatch.setattr(cpu, "_BLOCK", block)
        assert torch.equal(cpu.rank_keys(words, ranks), whole)


@pytest.mark.parametrize(("candidates", "victims"), [(120, 8), (1984, 64), (500, 1), (300, 100), (64, 64)])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_short_cut_plans_the_same_moves(
    candidates: int, victims: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = torch.arange(rows * 4).view(rows, 2, 2) * 0x1234567812345678
    keys = draws.rank_keys(words, torch.arange(candidates, dtype=torch.int32))
    events = [Round(i, 17, candidates, victims, 0, newest=victims) for i in range(rows)]
    taken, lowest = [], cpu.lowest_draws
    monkeypatch.setattr(cpu, "lowest_draws", lambda *a: taken.append(lowest(*a)) or taken[-1])
    short = plan(keys, events)
    assert (taken[0] is not None) == (2 * (victims + 5 * victims**0.5) <= candidates)
    monkeypatch.setattr(cpu, "lowest_draws", lambda *a: None)
    whole = plan(keys, events)
    assert torch.equal(short.src, whole.src)
    assert torch.equal(short.dst, whole.dst)


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 16), (torch.float32, 3), (torch.float16, 5)])
@pytest.mark.parametrize("run", [True, False])
def test_entries_move_alike_in_numpy_and_torch(dtype: torch.dtype, width: int, run: bool) -> None:
    """Also entries of odd sizes; the torch code is what a GPU runs."""
    entries = torch.randn(2, 3, 12, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    first = torch.arange(6).view(6, 1) * 12
    target = (first + torch.tensor([[1, 5], [2, 5], [3, 5]] * 2)).view(-1)
    source = slice(10, 12) if run else (first + torch.tensor([10, 11])).view(-1)
    expected = entries.clone().view(72, width)
    for s, t in zip((first + torch.tensor([10, 11])).view(-1).tolist(), target.tolist(), strict=True):
        expected[t] = entries.view(72, width)[s]
    for move in (positions._move_numpy, positions._move_torch):
        moved = entries.clone()
        move(moved, source, target)
        assert torch.equal(moved.view(72, width), expected)
