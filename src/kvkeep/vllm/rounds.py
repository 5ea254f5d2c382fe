"""Rounds of a step on paged caches: one plan for all requests, layers and heads, then moves layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import Round
from ..plan import Moves, plan
from .config import Serving
from .layouts import Layout
from .requests import Tracked
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

    Args:
        serving: the engine's settings.
        where: layers and heads.
        block_size: slots of a block.
    """

    def __init__(self, serving: Serving, where: Heads, block_size: int) -> None:
        self.serving, self.where, self.block_size = serving, where, block_size

    def plan(self, requests: Sequence[Tracked], numbers: Sequence[int], table: Tensor) -> list[list[LayerMoves]]:
        """What moves in a batch of rounds.

        Args:
            requests: whose rounds are due.
            numbers: the round of each.
            table: integers [R, B], block table of each.

        Returns:
            For each layer its moves, in one piece (several, one a request, with ``one_by_one``).
        """
        if self.serving.one_by_one:
            each = [
                self._together([r], [n], table[i : i + 1])
                for i, (r, n) in enumerate(zip(requests, numbers, strict=True))
            ]
            return [list(moves) for moves in zip(*each, strict=True)]
        return [[moves] for moves in self._together(requests, numbers, table)]

    def _together(self, requests: Sequence[Tracked], numbers: Sequence[int], table: Tensor) -> list[LayerMoves]:
        events = [r.timeline.event(n) for r, n in zip(requests, numbers, strict=True)]
        moves = self._moves(requests, numbers, events)
        src, dst = _with_windows(moves.src, moves.dst, events)
        if self.serving.moving == "gather":
            src, dst = _gathered(src, dst, events)
        return self._by_layer(src, dst, table)

    def _moves(self, requests: Sequence[Tracked], numbers: Sequence[int], events: Sequence[Round]) -> Moves:
        policy, unit = self.serving.policy, self.serving.policy.slots_per_unit
        if not policy.signals:
            return plan(policy.keys(look(self.serving, requests, events, self.where)), events, unit)
        stores = [r.positions(self.where) for r in requests]
        width = max(e.candidates for e in events)
        found = [s.candidates(n) for s, n in zip(stores, numbers, strict=True)]
        behind = torch.iinfo(torch.int32).max
        padded = [torch.nn.functional.pad(c, (0, width - c.shape[-1]), value=behind) for c in found]
        positions, order = torch.cat(padded).sort(dim=-1, stable=True)
        view = look(self.serving, requests, events, self.where, positions)
        moves = plan(policy.keys(view), events, unit, ranks=order)
        for i, (store, event) in enumerate(zip(stores, events, strict=True)):
            store.note(event, Moves(moves.src[i : i + 1], moves.dst[i : i + 1]))
        return moves

    def _by_layer(self, src: Tensor, dst: Tensor, table: Tensor) -> list[LayerMoves]:
        """Slots [R, L, H, m] (axes may be 1) to blocks and offsets, layer by layer."""
        src, dst = torch.broadcast_tensors(src, dst)
        layers, heads = len(self.where.layers), len(self.where.heads)
        blocks = table.to(torch.int64)[:, None, None, :].expand(-1, src.shape[1], src.shape[2], -1)

        def places(slots: Tensor) -> list[Places]:
            block = blocks.gather(-1, slots // self.block_size)
            spread = [x.expand(-1, -1, heads, -1).transpose(0, 1).flatten(1) for x in (block, slots % self.block_size)]
            return list(zip(*spread, strict=True))

        head = (
            torch.arange(heads, device=src.device)
            .view(1, heads, 1)
            .expand(src.shape[0], heads, src.shape[-1])
            .flatten()
        )
        per_layer = [LayerMoves(head, s, d) for s, d in zip(places(src), places(dst), strict=True)]
        return per_layer * layers if len(per_layer) == 1 else per_layer


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
