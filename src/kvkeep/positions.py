"""The position store: which token each slot holds.

An int32 beside each slot, moved with the entries like a third cache tensor. Policies whose heads
(or layers) share kept sets share positions too, so their store has one head (or one layer).
Without keys and values it is also a dry run: it replays what a content-free policy kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .layout import Round
from .plan import Moves


def first_slots(rows: Sequence[int], heads: int, capacity: int, device: torch.device) -> Tensor:
    """Index of slot 0 of each row and head in a ``[B, H, S, ...]`` tensor flattened over its first three axes.

    Args:
        rows: the batch rows.
        heads: H of the tensor.
        capacity: S of the tensor.
        device: where the index is needed.

    Returns:
        int64 [R, 1, H, 1].
    """
    return _first_slots(tuple(rows), heads, capacity, device)


@lru_cache(maxsize=16)  # the same at every round
def _first_slots(rows: tuple[int, ...], heads: int, capacity: int, device: torch.device) -> Tensor:
    first = (np.asarray(rows)[:, None] * heads + np.arange(heads)) * capacity
    with torch.inference_mode(False):  # a caller outside inference mode must be able to use what one inside it made
        return torch.from_numpy(first[:, None, :, None]).to(device)


def flat_slots(slots: Tensor, first: Tensor) -> Tensor:
    """Indices into the flattened tensor.

    Args:
        slots: int64 [R, L, H or 1, m].
        first: from :func:`first_slots`.

    Returns:
        int64 [L, R * H * m].
    """
    return (slots + first).transpose(0, 1).reshape(slots.shape[1], -1)


def windows(rows: Sequence[int], events: Sequence[Round], batch: int, turns: bool) -> list[tuple[int | slice, Round]]:
    """Windows that must move, as (row or all rows, event).

    Args:
        rows: the batch rows the events belong to.
        events: one a row.
        batch: B.
        turns: those of turns, which move before everything else, or those of rounds, which move last.
    """
    alike = len(rows) == batch and all(
        (e.turn, e.window, e.window_from, e.window_to)
        == (events[0].turn, events[0].window, events[0].window_from, events[0].window_to)
        for e in events[1:]
    )
    each: list[tuple[int | slice, Round]] = [(slice(None), events[0])] if alike else [*zip(rows, events, strict=True)]
    return [(row, e) for row, e in each if e.turn == turns and e.window and e.window_from != e.window_to]


def copy_windows(tensor: Tensor, moving: Sequence[tuple[int | slice, Round]]) -> None:
    """Move windows from :func:`windows` in place; ``tensor`` is [B, ..., S, D]."""
    for row, e in moving:
        part = tensor[row]
        window = part.narrow(-2, e.window_from, e.window)
        if abs(e.window_from - e.window_to) < e.window:  # the two places overlap
            window = window.clone()
        part.narrow(-2, e.window_to, e.window).copy_(window)


def move_entries(
    tensor: Tensor,
    source: Tensor | slice,
    target: Tensor,
    before: Sequence[tuple[int | slice, Round]],
    after: Sequence[tuple[int | slice, Round]],
) -> None:
    """Carry out a plan on keys or values, in place.

    Args:
        tensor: [B, H, S, D], contiguous.
        source: int64 [m], from :func:`flat_slots`, or the same slots of every row and head; all are
            read before anything is written.
        target: int64 [m]. Where it repeats, its sources must be the same.
        before: windows that move first, from :func:`windows`.
        after: windows that move last.
    """
    copy_windows(tensor, before)
    (_move_numpy if tensor.device.type == "cpu" else _move_torch)(tensor, source, target)
    copy_windows(tensor, after)


def _move_numpy(tensor: Tensor, source: Tensor | slice, target: Tensor) -> None:
    """numpy copies an entry with one memcpy, torch element by element, which takes twice as long."""
    entry_bytes = tensor.shape[-1] * tensor.element_size()
    slots: NDArray[np.void] = tensor.view(torch.uint8).numpy().view(f"V{entry_bytes}")[..., 0]  # [B, H, S]
    entries = slots.reshape(-1)
    moved = slots[:, :, source].reshape(-1) if isinstance(source, slice) else entries.take(source.numpy())
    entries[target.numpy()] = moved


def _move_torch(tensor: Tensor, source: Tensor | slice, target: Tensor) -> None:
    flat = tensor.view(-1, tensor.shape[-1])
    if tensor.shape[-1] * tensor.element_size() % 8 == 0:  # fewer and wider elements
        flat = flat.view(torch.int64)
    moving = flat.view(*tensor.shape[:3], -1)[:, :, source] if isinstance(source, slice) else flat[source]
    flat.index_copy_(0, target, moving.reshape(len(target), -1))


class PositionStore:
    """Positions of all rows: int32 [B, L, H, S].

    Tokens that arrive one after the other are noted lazily, at the next round: until then slot and
    position follow from each other.
    """

    def __init__(self, rows: int, layers: int, heads: int, capacity: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # the store outlives the mode a forward runs in
            self.data = torch.full((rows, layers, heads, capacity), -1, dtype=torch.int32, device=device)
        self.filled = [0] * rows

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.data.untyped_storage().nbytes()

    def resize(self, capacity: int) -> None:
        """Give every row ``capacity`` slots; what fits is kept."""
        if capacity == self.data.shape[-1]:
            return
        with torch.inference_mode(False):
            data = torch.full((*self.data.shape[:-1], capacity), -1, dtype=torch.int32, device=self.data.device)
        common = min(capacity, self.data.shape[-1])
        data[..., :common] = self.data[..., :common]
        self.data = data

    def select(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        with torch.inference_mode(False):
            self.data = self.data[list(order)].contiguous()
        self.filled = [self.filled[i] for i in order]

    def fill(self, row: int, cached: int, seen: int) -> None:
        """Note the tokens since the last call: the newest ones, in slots up to ``cached``."""
        first = self.filled[row]
        if cached > first:
            new = torch.arange(seen - (cached - first), seen, dtype=torch.int32, device=self.data.device)
            self.data[row, :, :, first:cached] = new
        self.filled[row] = cached

    def candidates(self, rows: Sequence[int], events: Sequence[Round]) -> Tensor:
        """Positions of the candidates in rank order, int32 [R, L, H, C]; padding is the largest int32."""
        width = max(e.candidates for e in events)
        found = [
            torch.nn.functional.pad(
                self.data[row, :, :, e.start : e.start + e.candidates],
                (0, width - e.candidates),
                value=torch.iinfo(torch.int32).max,
            )
            for row, e in zip(rows, events, strict=True)
        ]
        return torch.stack(found)

    def apply(self, rows: Sequence[int], events: Sequence[Round], moves: Moves) -> None:
        """Carry out a round or the room for a turn; every row must be filled before."""
        data = self.data.unsqueeze(-1)  # [B, L, H, S, 1]
        copy_windows(data, windows(rows, events, len(data), turns=True))
        self._move(rows, moves)
        copy_windows(data, windows(rows, events, len(data), turns=False))
        for row, e in zip(rows, events, strict=True):
            self.filled[row] += e.fresh if e.turn else -e.victims

    def _move(self, rows: Sequence[int], moves: Moves) -> None:
        if moves.empty:
            return
        _, layers, heads, capacity = self.data.shape
        first = first_slots(rows, layers * heads, capacity, self.data.device)
        src, dst = (
            flat_slots(slots.expand(-1, layers, heads, -1).reshape(len(rows), 1, layers * heads, -1), first)[0]
            for slots in (moves.src, moves.dst)
        )
        flat = self.data.view(-1)
        flat.index_copy_(0, dst, flat.index_select(0, src))

    def turn(self, row: int, slot: int, n: int, seen: int) -> None:
        """Note ``n`` tokens of a new turn, from position ``seen`` on, in slots [slot, slot + n)."""
        new = torch.arange(seen, seen + n, dtype=torch.int32, device=self.data.device)
        self.data[row, :, :, slot : slot + n] = new
        self.filled[row] = max(self.filled[row], slot + n)
