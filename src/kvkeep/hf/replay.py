"""Kept positions where none are stored: draws are pure functions, so a row's rounds can be drawn again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..layout import Round
from ..positions import PositionStore

if TYPE_CHECKING:
    from .rounds import Rounds


@dataclass(frozen=True)
class Logged:
    """One event of a row, enough to replay it: what happened, tokens seen before, tokens of the turn, its stream."""

    event: Round | None
    seen: int
    slot: int = 0
    turn: int = 0
    stream: int = 0


def replay(rounds: Rounds, log: Sequence[Logged]) -> PositionStore:
    """Carry out a row's events again, on positions alone.

    Args:
        rounds: whose policy draws; it sees no keys or queries.
        log: what happened to the row.

    Returns:
        A store of one row on the CPU.
    """
    store = PositionStore(1, *rounds.shape, 1, torch.device("cpu"))
    for entry in log:
        event = entry.event
        if event is None:
            store.turn(0, entry.slot, entry.turn, entry.seen)
            continue
        cached = event.window_from + event.window
        store.resize(max(store.data.shape[-1], cached + event.fresh))
        store.fill(0, cached, entry.seen)
        view, order = rounds.look([0], [event], torch.tensor([entry.stream]), store)
        moves = rounds.plan([0], [event], view, order, rounds.policy.keys(view), store)
        store.apply([0], [event], moves)
    return store
