"""What the evicting layers hold at a round, as policies see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..layout import Round, Row
from ..signals import ATTENTION, ENTROPY, EVOLUTION, VALUES, LayerView
from .layer import EvictingLayer
from .watch import Watch


class LayerViews:
    """Gives a :class:`~kvkeep.signals.LayerView` of any evicting layer.

    Args:
        which: batch rows that the round concerns.
        events: what happens to each: one event of all layers, or one of each.
        rows: their states, before the round.
        layers: the evicting layers.
        positions: int32 [R, L, H, S] of these rows' slots (axes that kept sets share are 1).
        watch: what was collected.
        columns: columns seen so far.
    """

    def __init__(
        self,
        which: Sequence[int],
        events: Sequence[Sequence[Round]],
        rows: Sequence[Row],
        layers: Sequence[EvictingLayer],
        positions: Tensor,
        watch: Watch,
        columns: int,
    ) -> None:
        self.which, self.events, self.rows, self.layers = list(which), events, rows, layers
        self.positions, self.watch, self.columns = positions, watch, columns
        self.count = max(e.candidates for of_layers in events for e in of_layers)
        self.slots = [max(row.at_layer(i).cached for row in rows) for i in range(len(layers))]
        # One tensor for all layers, since making it may wait for the device: cached, first and behind, of each row.
        each = range(len(layers)) if any(row.held for row in rows) or len(events[0]) > 1 else range(1)
        told = [[self._told(i, r) for r in range(len(rows))] for i in each]
        self.numbers = torch.tensor(told, device=positions.device).permute(0, 2, 1)[..., None, None]  # [L, 3, R, 1, 1]
        seen = torch.tensor([row.seen for row in rows], device=positions.device)[:, None]
        self.query_positions = seen + torch.arange(-watch.ring.window, 0, device=seen.device) if watch.ring else None

    def _told(self, i: int, r: int) -> tuple[int, int, int]:
        """Slots of a layer of a row: those cached, the first candidate's, the first behind candidates."""
        events = self.events[r]
        event = events[i if len(events) > 1 else 0]
        return self.rows[r].at_layer(i).cached, event.start, event.start + event.candidates

    def __call__(self, i: int) -> LayerView:
        """The i-th evicting layer."""
        layer = self.layers[i]
        assert layer.k is not None
        assert layer.v is not None
        device = layer.k.device
        slots = self.slots[i]
        cached, first, behind = self.numbers[i if len(self.numbers) > 1 else 0].to(device)
        at = torch.arange(slots, device=device)
        filled = at < cached  # [R, 1, N]
        eligible = (at >= first) & (at < behind)
        positions = self.positions[:, i if self.positions.shape[1] > 1 else 0, :, :slots].to(device)
        positions = positions.expand(-1, layer.heads, -1)
        order = positions.masked_fill(~filled, torch.iinfo(torch.int32).max).argsort(dim=-1, stable=True)
        chosen = eligible.expand_as(positions).gather(-1, order)
        # Candidates first, in order of position: a stable sort of a flag.
        places = (~chosen).to(torch.uint8).argsort(dim=-1, stable=True)[..., : self.count]
        if places.shape[-1] < self.count:  # another layer has more candidates
            places = torch.nn.functional.pad(places, (0, self.count - places.shape[-1]))
        whole = self.which == list(range(layer.k.shape[0]))

        def of_rows(tensor: Tensor) -> Tensor:
            return (tensor if whole else tensor[self.which])[:, :, :slots]

        policy, beside = self.watch.policy, {}
        for name, field in ((ATTENTION, "received"), (ENTROPY, "entropy"), (EVOLUTION, "evolution")):
            if name in policy.signals:
                assert layer.beside is not None
                beside[field] = of_rows(layer.beside)[..., self.watch.columns[name]]
        view = LayerView(
            keys=of_rows(layer.k),
            positions=positions,
            filled=filled,
            window=filled & (at >= behind),
            order=order,
            places=places,
            index=i,
            values=of_rows(layer.v) if VALUES in policy.signals else None,
            eligible=eligible,
            rotary=self.watch.rotary,
            **beside,  # type: ignore[arg-type]
        )
        return self._with_queries(view, layer.number)

    def _with_queries(self, view: LayerView, number: int) -> LayerView:
        ring, digests = self.watch.ring, self.watch.digests
        if digests is not None:
            view = replace(view, digest=digests.get(number, self.which), pending=digests.pending(number))
        if ring is None or self.query_positions is None:
            return view
        queries = ring.get(number, self.which, self.columns)
        return replace(
            view,
            queries=queries,
            query_positions=self.query_positions.to(queries.device),
            scaling=ring.scaling[number],
        )
