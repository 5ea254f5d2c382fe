"""The position store: which token each slot holds.

An int32 beside each slot, moved with the entries like a third cache tensor. Policies whose heads
(or layers) share kept sets share positions too, so their store has one head (or one layer).
Without keys and values it is also a dry run: it replays what a content-free policy kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .layout import Round
from .plan import Moves


def flat_slots(slots: Tensor, rows: Tensor, heads: int, capacity: int) -> Tensor:
    """Indices into a ``[B, H, S, ...]`` tensor flattened over its first three axes.

    Args:
        slots: int64 [R, L, H or 1, m].
        rows: int64 [R], the batch rows.
        heads: H of the tensor.
        capacity: S of the tensor.

    Returns:
        int64 [L, R * H * m].
    """
    head = torch.arange(heads, device=slots.device).view(1, 1, -1, 1)
    flat = (rows.view(-1, 1, 1, 1) * heads + head) * capacity + slots  # [R, L, H, m]
    return flat.transpose(0, 1).reshape(slots.shape[1], -1)


def copy_window(tensor: Tensor, rows: Sequence[int], events: Sequence[Round]) -> None:
    """Move each row's window, in place.

    Args:
        tensor: [B, ..., S, D] where S is the axis before the last.
        rows: the batch rows the events belong to.
        events: one a row.
    """
    places = {(e.window, e.window_from, e.window_to) for e in events}
    if len(places) == 1 and len(rows) == tensor.shape[0]:
        _shift(tensor, *places.pop())
        return
    for row, e in zip(rows, events, strict=True):
        _shift(tensor[row], e.window, e.window_from, e.window_to)


def _shift(tensor: Tensor, width: int, source: int, target: int) -> None:
    if width == 0 or source == target:
        return
    window = tensor.narrow(-2, source, width)
    if abs(source - target) < width:  # the two places overlap
        window = window.clone()
    tensor.narrow(-2, target, width).copy_(window)


class PositionStore:
    """Positions of all rows: int32 [B, L, H, S].

    Tokens that arrive one after the other are noted lazily, at the next round: until then slot and
    position follow from each other.
    """

    def __init__(self, rows: int, layers: int, heads: int, capacity: int, device: torch.device) -> None:
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
        data = self.data.new_full((*self.data.shape[:-1], capacity), -1)
        common = min(capacity, self.data.shape[-1])
        data[..., :common] = self.data[..., :common]
        self.data = data

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
        turns = [i for i, e in enumerate(events) if e.turn]
        rounds = [i for i, e in enumerate(events) if not e.turn]
        data = self.data.unsqueeze(-1)  # [B, L, H, S, 1]
        copy_window(data, [rows[i] for i in turns], [events[i] for i in turns])
        self._move(rows, moves)
        copy_window(data, [rows[i] for i in rounds], [events[i] for i in rounds])
        for row, e in zip(rows, events, strict=True):
            self.filled[row] += e.fresh if e.turn else -e.victims

    def _move(self, rows: Sequence[int], moves: Moves) -> None:
        if moves.empty:
            return
        _, layers, heads, capacity = self.data.shape
        index = torch.tensor(rows, dtype=torch.int64, device=self.data.device)
        src, dst = (
            flat_slots(
                slots.expand(-1, layers, heads, -1).reshape(len(rows), 1, layers * heads, -1),
                index,
                layers * heads,
                capacity,
            )[0]
            for slots in (moves.src, moves.dst)
        )
        flat = self.data.view(-1)
        flat.index_copy_(0, dst, flat.index_select(0, src))

    def turn(self, row: int, slot: int, n: int, seen: int) -> None:
        """Note ``n`` tokens of a new turn, from position ``seen`` on, in slots [slot, slot + n)."""
        new = torch.arange(seen, seen + n, dtype=torch.int32, device=self.data.device)
        self.data[row, :, :, slot : slot + n] = new
        self.filled[row] = max(self.filled[row], slot + n)
