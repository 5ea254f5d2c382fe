"""Rounds of a step on paged caches: one plan for all requests, layers and heads, then moves layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import Round
from ..plan import Moves, plan
from .config import Serving
from .layouts import Layout
from .requests import Tracked
from .transfer import send
from .views import Heads, look

Places = tuple[Tensor, Tensor]  # blocks and offsets in them, int64 [M] each


@dataclass(frozen=True)
class LayerMoves:
    """Entries that move in one layer: int64 [M] each."""

    heads: Tensor
    src: Places
    dst: Places

    def run(self, layout: Layout, cache: Tensor) -> None:
        """Carry them out on the layer's cache."""
        layout.move(cache, self.heads, self.src, self.dst)


class Rounds:
    """Plans rounds of the layers that share a block table.

    Plans are made on the host, where they take a few milliseconds for the largest models and never wait for a GPU;
    what moves then goes to the table's device in one copy.

    Args:
        serving: the engine's settings.
        where: layers and heads.
        block_size: slots of a block.
    """

    def __init__(self, serving: Serving, where: Heads, block_size: int) -> None:
        self.serving, self.where, self.block_size = serving, where, block_size

    def plan(
        self, requests: Sequence[Tracked], numbers: Sequence[int], table: Tensor, rows: Sequence[int]
    ) -> list[list[LayerMoves]]:
        """What moves in a batch of rounds.

        Args:
            requests: whose rounds are due.
            numbers: the round of each.
            table: integers [R, B], block tables on the caches' device.
            rows: the row of each request in it.

        Returns:
            For each layer its moves, in one piece (several, one a request, with ``one_by_one``).
        """
        due = [_Due(r, n, row, r.timeline.event(n)) for r, n, row in zip(requests, numbers, rows, strict=True)]
        if self.serving.one_by_one:
            each = [self._by_layer(self._pieces([one]), table) for one in due]
            return [list(moves) for moves in zip(*each, strict=True)]
        return [[moves] for moves in self._by_layer(self._pieces(due), table)]

    def _pieces(self, due: Sequence[_Due]) -> list[_Piece]:
        """Moves between slots, for rounds of one shape at a time.

        Planning is several times faster where all rows have equally many candidates and victims.
        """
        alike: dict[tuple[int, ...], list[_Due]] = {}
        for one in due:
            event = one.event
            alike.setdefault((event.candidates, event.victims, event.newest, event.window), []).append(one)
        pieces = []
        for group in alike.values():
            events = [one.event for one in group]
            moves = self._moves(group, events)
            src, dst = _with_windows(moves.src, moves.dst, events)
            if self.serving.moving == "gather":
                src, dst = _gathered(src, dst, events)
            src, dst = torch.broadcast_tensors(src, dst)
            rows = torch.tensor([one.row for one in group]).repeat_interleave(src.shape[-1])
            pieces.append(_Piece(rows, _rows_last(src), _rows_last(dst)))
        return pieces

    def _moves(self, due: Sequence[_Due], events: Sequence[Round]) -> Moves:
        policy, unit = self.serving.policy, self.serving.policy.slots_per_unit
        requests = [one.request for one in due]
        if not policy.signals:
            return plan(policy.keys(look(self.serving, requests, events, self.where)), events, unit)
        stores = [r.positions(self.where) for r in requests]
        found = torch.cat([s.candidates(one.number) for s, one in zip(stores, due, strict=True)])
        positions, order = found.sort(dim=-1, stable=True)
        view = look(self.serving, requests, events, self.where, positions)
        moves = plan(policy.keys(view), events, unit, ranks=order)
        for i, (store, event) in enumerate(zip(stores, events, strict=True)):
            store.note(event, Moves(moves.src[i : i + 1], moves.dst[i : i + 1]))
        return moves

    def _by_layer(self, pieces: Sequence[_Piece], table: Tensor) -> list[LayerMoves]:
        """Slots to blocks and offsets on the table's device, layer by layer."""
        slots = torch.stack([torch.cat([getattr(p, name) for p in pieces], dim=-1) for name in ("src", "dst")])
        rows = torch.cat([p.rows for p in pieces])
        layers, heads, count = len(self.where.layers), len(self.where.heads), len(rows)
        # [2, L, H, M]; L and H may be 1 where layers or heads share their draw.
        block, offset = (send(x, table.device) for x in (slots // self.block_size, slots % self.block_size))
        block = table[send(rows, table.device), block].to(torch.int64)
        places = [x.expand(-1, -1, heads, -1).flatten(2).unbind(1) for x in (block, offset)]
        head = torch.arange(heads, device=table.device).view(heads, 1).expand(heads, count).flatten()
        per_layer = [LayerMoves(head, (b[0], o[0]), (b[1], o[1])) for b, o in zip(*places, strict=True)]
        return per_layer * layers if len(per_layer) == 1 else per_layer


class _Due(NamedTuple):
    request: Tracked
    number: int
    row: int
    event: Round


class _Piece(NamedTuple):
    """Moves of some requests: rows of the block table int64 [M], slots int64 [L, H, M] (L and H may be 1)."""

    rows: Tensor
    src: Tensor
    dst: Tensor


def _rows_last(slots: Tensor) -> Tensor:
    """[R, L, H, m] -> [L, H, R * m]."""
    return slots.permute(1, 2, 0, 3).flatten(2)


def _with_windows(src: Tensor, dst: Tensor, events: Sequence[Round]) -> tuple[Tensor, Tensor]:
    """Moves and, with a window wider than the buffer, its way down, as slots [R, L, H, m]."""
    if events[0].window == 0:  # the same for all, since it follows from the settings
        return src, dst
    step = torch.arange(events[0].window)
    first = torch.tensor([[e.window_from, e.window_to] for e in events])
    windows = (first[:, :, None] + step).unbind(1)  # [R, w] each
    return (
        torch.cat([src, windows[0][:, None, None].expand(*src.shape[:3], -1)], dim=-1),
        torch.cat([dst, windows[1][:, None, None].expand(*dst.shape[:3], -1)], dim=-1),
    )


def _gathered(src: Tensor, dst: Tensor, events: Sequence[Round]) -> tuple[Tensor, Tensor]:
    """The same kept sets in the same slots, but with every entry behind the prompt copied, as compaction would."""
    src, dst = torch.broadcast_tensors(src, dst)
    start = torch.tensor([e.start for e in events]).view(-1, 1, 1, 1)
    kept = max(e.window_from + e.window - e.victims - e.start for e in events)
    last = torch.tensor([e.window_from + e.window - e.victims - e.start - 1 for e in events]).view(-1, 1, 1, 1)
    ranks = torch.minimum(torch.arange(kept), last).expand(*src.shape[:3], -1)
    source = torch.arange(kept + 1).expand(*src.shape[:3], -1).clone()
    into = (dst - start).clamp(max=kept)  # moves that stay behind K are padding
    source.scatter_(-1, torch.where(dst - start <= last, into, kept), src - start)
    return source.gather(-1, ranks) + start, ranks + start
