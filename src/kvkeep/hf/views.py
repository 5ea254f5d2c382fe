"""What the evicting layers hold at a round, as policies see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..layout import Round, Row
from ..positions import PositionStore
from ..signals import LayerView
from .layer import EvictingLayer
from .queries import QueryRing


class LayerViews:
    """Gives a :class:`~kvkeep.signals.LayerView` of any evicting layer.

    Args:
        which: batch rows that the round concerns.
        events: what happens to each.
        rows: their states, before the round.
        layers: the evicting layers.
        store: positions of all rows' slots.
        ring: the newest queries, if they are kept.
        columns: columns seen so far.
    """

    def __init__(
        self,
        which: Sequence[int],
        events: Sequence[Round],
        rows: Sequence[Row],
        layers: Sequence[EvictingLayer],
        store: PositionStore,
        ring: QueryRing | None,
        columns: int,
    ) -> None:
        self.which, self.layers, self.ring, self.columns = list(which), layers, ring, columns
        device = store.data.device
        self.slots = max(row.cached for row in rows)
        self.count = max(e.candidates for e in events)
        at = torch.arange(self.slots, device=device)
        cached = torch.tensor([row.cached for row in rows], device=device)[:, None, None]
        first = torch.tensor([e.start for e in events], device=device)[:, None, None]
        last = first + torch.tensor([e.candidates for e in events], device=device)[:, None, None]
        self.filled = at < cached  # [R, 1, N]
        self.window = self.filled & (at >= last)  # [R, 1, N]
        self.eligible = (at >= first) & (at < last)  # [R, 1, N]
        self.positions = store.data[self.which, :, :, : self.slots]  # [R, L, H, N]
        self.seen = torch.tensor([row.seen for row in rows], device=device)[:, None]

    def __call__(self, i: int) -> LayerView:
        """The i-th evicting layer."""
        layer = self.layers[i]
        assert layer.k is not None
        positions = self.positions[:, i if self.positions.shape[1] > 1 else 0].to(layer.k.device)
        positions = positions.expand(-1, layer.heads, -1)
        filled, window, eligible = (mask.to(layer.k.device) for mask in (self.filled, self.window, self.eligible))
        order = positions.masked_fill(~filled, torch.iinfo(torch.int32).max).argsort(dim=-1, stable=True)
        chosen = eligible.expand_as(positions).gather(-1, order)
        # Candidates first, in order of position: a stable sort of a flag.
        places = (~chosen).to(torch.uint8).argsort(dim=-1, stable=True)[..., : self.count]
        whole = self.which == list(range(layer.k.shape[0]))
        keys = (layer.k if whole else layer.k[self.which])[:, :, : self.slots]
        view = LayerView(keys, positions, filled, window, order, places)
        if self.ring is None:
            return view
        queries = self.ring.get(layer.number, self.which, self.columns)
        newest = torch.arange(-self.ring.window, 0, device=queries.device)
        return replace(
            view,
            queries=queries,
            query_positions=self.seen.to(queries.device) + newest,
            scaling=self.ring.scaling[layer.number],
        )
