"""The round's arithmetic on a CPU, with numpy: the same numbers as :mod:`draws` and :mod:`plan`.

A round of one request works on small arrays, and starting a torch operation on them costs more than
the operation; numpy starts in a third of the time and has logical shifts. The torch code remains the
reference and runs on every other device.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_Words = NDArray[np.uint64]
_Ints = NDArray[np.int64]
_U64, _U32 = np.uint64, np.uint32

# splitmix64 (Steele, Lea & Flood 2014): Weyl increment and the two multipliers of its finaliser.
WEYL = 0x9E3779B97F4A7C15
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB
# A 32-bit xorshift-multiply finaliser with low bias (constants of the "hash prospector" search).
RANK_STEP = 0x9E3779B1
KEY_A = 0x21F0AAAD
KEY_B = 0xD35A2D97

_BLOCK = 1 << 15  # keys hashed at a time: they stay in a core's cache


def _mix64(x: _Words) -> _Words:
    """splitmix64's finaliser, in place."""
    x ^= x >> _U64(30)
    x *= _U64(MIX_A)
    x ^= x >> _U64(27)
    x *= _U64(MIX_B)
    x ^= x >> _U64(31)
    return x


def _bits(values: Tensor) -> _Words:
    return values.numpy().view(_U64)


def round_words(seed: int, streams: Tensor, layers: Tensor, heads: Tensor, rounds: Tensor) -> Tensor:
    """See :func:`kvkeep.draws.round_words`."""
    weyl, one = _U64(WEYL), _U64(1)
    x = _mix64(_bits(streams) + _U64(seed * WEYL & (1 << 64) - 1))
    x = _mix64(x ^ (_bits(rounds) * weyl))  # [R]
    x = _mix64(x[:, None] ^ ((_bits(layers) + one) * weyl))  # [R, L]
    x = _mix64(x[:, :, None] ^ ((_bits(heads) + one) * weyl))  # [R, L, H]
    return torch.from_numpy(x.view(np.int64))


def rank_keys(words: Tensor, ranks: Tensor) -> Tensor:
    """See :func:`kvkeep.draws.rank_keys`."""
    flat = _bits(words.contiguous()).reshape(-1, 1)
    low, high = flat.astype(_U32), (flat >> _U64(32)).astype(_U32)
    stepped = ranks.numpy().view(_U32) * _U32(RANK_STEP)
    keys = np.empty((len(flat), len(stepped)), _U32)
    rows = max(1, _BLOCK // max(1, len(stepped)))
    shifted = np.empty_like(keys[:rows])
    for i in range(0, len(flat), rows):
        x = keys[i : i + rows]
        y = shifted[: len(x)]
        np.add(stepped, low[i : i + rows], out=x)
        x ^= np.right_shift(x, _U32(16), out=y)
        x *= _U32(KEY_A)
        x ^= np.right_shift(x, _U32(15), out=y)
        x += high[i : i + rows]
        x *= _U32(KEY_B)
        x ^= np.right_shift(x, _U32(15), out=y)
    return torch.from_numpy(keys.view(np.int32)).view(*words.shape, len(stepped))


def lowest_draws(draws: Tensor, count: int) -> Tensor | None:
    """Ranks of each head's lowest draws in ascending order, int64 [..., count].

    Draws are uniform, so a fixed bound lets through a few more than ``count``, and only those are
    looked at: a third of topk's time for the same victims, since draws have no ties.

    Args:
        draws: int32 [..., C], distinct along the last axis.
        count: how many.

    Returns:
        None where the bound does not help (few candidates) or let too few through.
    """
    width = draws.shape[-1]
    passing = count + 5 * math.sqrt(count)  # expected; a head falls short about once in a million rounds
    if not count or 2 * passing > width:
        return None
    flat = draws.contiguous().view(-1).numpy()
    starts = np.arange(0, len(flat) + 1, width)  # of each head
    hits = np.flatnonzero(flat < np.int32(int((1 << 32) * passing / width) - (1 << 31)))
    first = hits.searchsorted(starts)
    found = np.diff(first)
    if found.min() < count:
        return None
    drawn = flat.take(hits)
    column = np.arange(found.max())
    table = drawn.take(first[:-1, None] + column, mode="clip")  # [heads, found]
    table[column >= found[:, None]] = np.iinfo(np.int32).max
    table.partition(count - 1, axis=-1)
    lowest = hits[drawn <= table[:, count - 1].repeat(found)].reshape(-1, count) - starts[:-1, None]
    return torch.from_numpy(lowest).view(*draws.shape[:-1], count)
