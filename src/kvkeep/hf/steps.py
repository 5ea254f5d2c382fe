"""From rows to a forward: where it writes, what its attention sees.

Rows that hold equal numbers of entries and have no padding need no mask of their own: the model's
mask is right, since the newest entries lie last. All others get a :class:`RowMask`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..layout import Row
from .step import RowMask, Step


def bound(rows: Sequence[Row]) -> int | None:
    """Slots the storage needs for good: the widest row's K + r; None without a budget."""
    limits = [row.limit for row in rows]
    return None if limits[0] is None else max(x for x in limits if x is not None)


def _widest(rows: Sequence[Row]) -> int:
    return max(row.cached for row in rows)


def _column(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).unsqueeze(1)


def by_layer(layers: int, rows: Sequence[Row], make: Callable[[Callable[[Row], Row]], Step]) -> Step:
    """A step that is made once, or once for each layer where they hold different numbers of entries.

    Args:
        layers: evicting layers.
        rows: after the forward.
        make: makes a step, given what turns a row into the row that its layer sees.
    """
    if not any(row.held for row in rows):
        return make(lambda row: row)
    parts = [make(lambda row, i=i: row.at_layer(i)) for i in range(layers)]  # type: ignore[misc]
    widest = max(parts, key=lambda part: part.needed)
    return replace(widest, parts=parts)


def prompt_step(
    before: Sequence[Row], after: Sequence[Row], pads: list[int], q: int, padded: bool, device: torch.device
) -> Step:
    """A chunk of the first prompt, ``q`` columns of which ``pads`` are padding."""
    stored = _widest(before)
    step = Step(q, [row.cached for row in before], pads, stored, max(1, _widest(after)), bound(after), appended=padded)
    if padded and stored:  # the very first chunk sees itself alone: the model's mask knows its padding
        step.mask = _behind([row.cached for row in before], pads, q, device)
    return step


def trace_step(starts: list[int], after: Sequence[Row], q: int, padded: bool, device: torch.device) -> Step:
    """``q`` trace tokens a row, each row's behind its other entries."""
    step = Step(q, starts, [0] * len(starts), max(starts), _widest(after), bound(after))
    if padded and q > 1:
        step.appended = True
        step.mask = _behind(starts, step.pads, q, device)
    elif padded and step.uniform:
        step.unmasked = True  # the model's mask would hide slots where there once was padding
    elif padded:
        step.mask = RowMask(torch.arange(step.needed, device=device) <= _column(starts, device), 0)
    return step


def turn_step(starts: list[int], after: Sequence[Row], q: int, masked: bool, device: torch.device) -> Step:
    """``q`` prompt tokens of a later turn, in slots that may lie among older entries."""
    slots = _widest(after)
    pads = [0] * len(starts)
    if not masked:
        return Step(q, starts, pads, slots - q, slots, bound(after))
    place = torch.arange(slots, device=device)
    first = _column(starts, device)
    old = (place < _column([row.cached for row in after], device)) & ~((place >= first) & (place < first + q))
    mask = RowMask(torch.cat([old, old.new_ones(len(starts), q)], dim=1), q)
    return Step(q, starts, pads, slots, slots, bound(after), appended=True, mask=mask)


def _behind(counts: Sequence[int], pads: Sequence[int], q: int, device: torch.device) -> RowMask:
    """What is stored, followed by this forward's columns."""
    old = torch.arange(max(counts), device=device) < _column(counts, device)
    new = torch.arange(q, device=device) >= _column(pads, device)
    return RowMask(torch.cat([old, new], dim=1), q)


def too_long(q: int, space: int) -> str:
    """Why ``q`` trace tokens were refused where at most ``space`` fit."""
    return (
        f"a forward of {q} trace tokens would cross a round: at most {space} fit now. Split it there "
        "(cache.trace_space() says how many fit), or run it inside cache.as_prompt() if it is a new turn."
    )
