"""Rounds of policies that give layers budgets of their own.

Every layer of a row then has an event of its own, with its own candidates and victims. Planner and position store take
each (row, layer) for a row of one layer, so nothing there knows of it; only what is moved loops over layers, as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ..budget import split
from ..layout import Round, Row
from ..plan import Moves, Overrides, plan
from .moves import move_layers

if TYPE_CHECKING:
    from .rounds import Rounds


def split_round(
    rounds: Rounds, which: list[int], events: list[Round], rows: list[Row], streams: Tensor, columns: int
) -> dict[int, tuple[int, ...]]:
    """Carry out what happens to each row, layer by layer.

    Args:
        rounds: of the cache.
        which: batch rows concerned.
        events: what happens to each, for the mean over layers.
        rows: their states, before.
        streams: int64 [R], theirs.
        columns: seen so far.

    Returns:
        What each layer of each row holds afterwards, by batch row.
    """
    layers, heads, store = len(rounds.layers), rounds.shape[1], rounds.store
    assert store is not None
    before = [row.by_layer(layers) for row in rows]
    # What a layer keeps is not known yet; who the candidates are does not depend on it.
    shown = [
        [e if e.turn else row.event_at(e, i, held[i] - e.victims) for i in range(layers)]
        for e, row, held in zip(events, rows, before, strict=True)
    ]
    stored = rounds.stored(which)
    positions = store.candidates(stored, [e for of_layers in shown for e in of_layers])
    positions = positions.view(len(which), layers, heads, -1)
    views = rounds.views(which, shown, rows, columns)
    view, order = rounds.show(events, streams, positions, views, [row.seen for row in rows])
    keys = rounds.policy.keys(view)
    rounds.check(keys, view)
    wanted = rounds.policy.allot(view, keys)
    held = [_budgets(e, wanted, r, before[r], rows[r]) for r, e in enumerate(events)]
    final = [
        [e if e.turn else row.event_at(e, i, kept[i]) for i in range(layers)]
        for e, row, kept in zip(events, rows, held, strict=True)
    ]
    flat = [e for of_layers in final for e in of_layers]
    keys = keys.expand(-1, layers, heads, -1)
    keys, order, overrides = rounds.overridden(which, view.positions, keys, order)
    moves = plan(_flat(keys), flat, 1, _flat_masks(overrides), None if order is None else _flat(order))
    for i, layer in enumerate(rounds.layers):
        src, dst = (t.view(len(which), layers, *t.shape[2:])[:, i : i + 1] for t in (moves.src, moves.dst))
        move_layers([layer], which, [of_layers[i] for of_layers in final], Moves(src, dst))
    store.apply(stored, flat, moves)
    return {i: kept for i, kept, e in zip(which, held, events, strict=True) if not e.turn or len(set(kept)) > 1}


def _budgets(event: Round, wanted: Tensor | None, row: int, before: tuple[int, ...], state: Row) -> tuple[int, ...]:
    """Whole entries that each layer keeps, of which the sum is exact."""
    if event.turn or wanted is None:
        return tuple(held - event.victims for held in before)
    window = event.newest + event.window
    kept = event.window_from + event.window - event.victims
    pins = state.protection.pinned(state.first_protected, state.seen)
    return tuple(split(wanted[row].tolist(), kept * len(before), min(event.start + window + pins, kept), before))


def _flat(x: Tensor) -> Tensor:
    """[R, L, H, n] -> [R * L, 1, H, n]."""
    return x.reshape(-1, 1, *x.shape[2:])


def _flat_masks(overrides: Overrides | None) -> Overrides | None:
    if overrides is None:
        return None
    keep, forget = (None if m is None else _flat(m) for m in (overrides.keep, overrides.forget))
    return Overrides(keep, forget)
