"""Carrying out a plan on the storage of layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..layout import Round
from ..plan import Moves
from ..positions import first_slots, flat_slots, move_entries, windows
from .layer import EvictingLayer


def move_layers(layers: Sequence[EvictingLayer], which: Sequence[int], events: Sequence[Round], moves: Moves) -> None:
    """Moves, and the window before a turn or after a round, in layers that all hold the same number of entries.

    Args:
        layers: the evicting layers; their entries and the numbers beside them move together.
        which: batch rows that ``events`` concern.
        events: what happens to each.
        moves: [R, L, H, m], L is 1 where layers share them.
    """
    assert layers[0].k is not None
    batch, heads, capacity, _ = layers[0].k.shape
    before, after = windows(which, events, batch, turns=True), windows(which, events, batch, turns=False)
    first = first_slots(which, heads, capacity, moves.src.device)
    # One index a layer, or a single one for all.
    targets = flat_slots(moves.dst, first).unbind()
    sources: Sequence[Tensor | slice] = [slice(moves.run, (moves.run or 0) + moves.dst.shape[-1])]
    if moves.run is None or len(which) < batch:
        sources = flat_slots(moves.src, first).unbind()
    for i, layer in enumerate(layers):
        source, target = sources[i % len(sources)], targets[i % len(targets)]
        for tensor in (layer.k, layer.v, layer.beside):
            if tensor is None:
                continue
            if target.device != tensor.device:  # layers spread over several devices
                source = source if isinstance(source, slice) else source.to(tensor.device)
                target = target.to(tensor.device)
            move_entries(tensor, source, target, before, after)
