"""From scores or draws to moves: one plan for all rows, layers and heads of a round.

The r lowest keys of a head are its victims. What survives in the slots to be freed moves into the
victims' slots, the i-th survivor to the i-th victim, both in rank order: at most r moves a head,
where compaction would copy K. Everything is a fixed number of tensor operations without
``nonzero`` or ``item``; rows that need fewer moves are padded with moves of a slot onto itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from . import cpu
from .layout import Round

_RANK_BITS = 24  # candidates of one head and round that can be told apart: 16.7 million
_CLASS = 1 << 58
_NOWHERE = 1 << 40  # a rank behind all real ones


@dataclass(frozen=True)
class Moves:
    """Slots to copy, ``src`` to ``dst``; read all sources before writing.

    Shapes are int64 [R, L, H, m]; L or H is 1 where layers or heads share their draw.
    A move whose ``src`` equals its ``dst`` is padding. ``run`` is set if the sources of every row
    and head are the m slots from there on, as they are where the newest overwrite the victims.
    """

    src: Tensor
    dst: Tensor
    run: int | None = None

    @property
    def empty(self) -> bool:
        return self.src.shape[-1] == 0


@dataclass(frozen=True)
class Overrides:
    """Entries a probe forces to stay or to go, by (row, layer, head, position).

    Both are bool [R, L, H, T] (axes may be 1), already gathered along the last axis at the
    candidates' positions. They outrank the policy's keys; ``keep`` outranks ``forget``.
    """

    keep: Tensor | None = None
    forget: Tensor | None = None


def sortable(keys: Tensor) -> Tensor:
    """int64 keys with the order of ``keys`` (int32 or float32; NaN counts as the highest)."""
    if keys.dtype == torch.int32:
        return keys.to(torch.int64)
    if keys.dtype != torch.float32:
        raise TypeError(f"a policy returns int32 draws or float32 scores, got {keys.dtype}")
    bits = (keys + 0.0).contiguous().view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)


def _column(values: Sequence[int], device: torch.device) -> Tensor | int:
    """One value a row, as a column to broadcast; a plain number if all rows have the same."""
    if len(set(values)) == 1:
        return values[0]
    return torch.tensor(values, dtype=torch.int64, device=device).view(-1, 1, 1, 1)


def eviction_order(keys: Tensor, candidates: Sequence[int], overrides: Overrides | None = None) -> Tensor:
    """Keys whose lowest values are the victims, without ties.

    Args:
        keys: int32 draws or float32 scores [R, L, H, C].
        candidates: number of real candidates of each row; what lies behind is padding.
        overrides: entries forced to stay or to go.

    Returns:
        Integers [R, L, H, C]; equal scores are ordered by rank.
    """
    width = keys.shape[-1]
    forced = overrides is not None and (overrides.keep is not None or overrides.forget is not None)
    if keys.dtype == torch.int32 and not forced and all(c == width for c in candidates):
        return keys  # draws are a bijection of the rank: already without ties
    if width >= 1 << _RANK_BITS:
        raise ValueError(f"{width} candidates a head are more than {(1 << _RANK_BITS) - 1}: lower the budget")
    ranks = torch.arange(width, device=keys.device)
    order = (sortable(keys) << _RANK_BITS) + ranks
    if overrides is not None and forced:
        classes = torch.zeros_like(order)
        if overrides.forget is not None:
            classes = torch.where(overrides.forget, -_CLASS, classes)
        if overrides.keep is not None:
            classes = torch.where(overrides.keep, _CLASS, classes)
        order = order + classes
    return torch.where(ranks < _column(candidates, keys.device), order, 2 * _CLASS + ranks)


def plan(
    keys: Tensor,
    events: Sequence[Round],
    unit: int = 1,
    overrides: Overrides | None = None,
    ranks: Tensor | None = None,
) -> Moves:
    """Choose the victims of a round and say what moves where.

    Args:
        keys: int32 draws or float32 scores [R, L, H, C / unit], lowest go first.
        events: what happens to each of the R rows.
        unit: consecutive slots that live and die together.
        overrides: entries forced to stay or to go.
        ranks: int64 [R, L, H, C], the rank of each column of ``keys`` where these are not in rank
            order (policies that see their candidates by position).

    Returns:
        Moves between slots.
    """
    sizes = [_Sizes(*(n // unit for n in (e.candidates, e.victims, e.newest, e.fresh))) for e in events]
    victims = _victims(keys, sizes, overrides)
    if ranks is not None:
        there = victims < _NOWHERE
        victims = ranks.gather(-1, victims.clamp_max(ranks.shape[-1] - 1)).where(there, _NOWHERE).sort(dim=-1).values
    run = None
    if all(s.victims == s.newest == sizes[0].victims and not e.turn for s, e in zip(sizes, events, strict=True)):
        # What a round frees are the slots of the newest: the i-th newest overwrites the i-th victim.
        first = torch.tensor([s.candidates for s in sizes], device=keys.device).view(-1, 1, 1, 1)
        src, dst = first + torch.arange(sizes[0].victims, device=keys.device), victims
        firsts = {e.start + e.candidates for e in events}
        run = firsts.pop() if len(firsts) == 1 else None
    else:
        src, dst = _pair(victims, [e.turn for e in events], sizes)
    if unit > 1:
        inside = torch.arange(unit, device=keys.device)
        src = (src.unsqueeze(-1) * unit + inside).flatten(-2)
        dst = (dst.unsqueeze(-1) * unit + inside).flatten(-2)
    start = _column([e.start for e in events], keys.device)
    return Moves(src + start, dst + start, run)


class _Sizes(NamedTuple):
    """A round in units."""

    candidates: int
    victims: int
    newest: int
    fresh: int

    @property
    def freed(self) -> int:
        return self.victims + self.fresh

    @property
    def total(self) -> int:
        return self.candidates + self.newest + self.fresh


def _victims(keys: Tensor, sizes: Sequence[_Sizes], overrides: Overrides | None) -> Tensor:
    """Columns of ``keys`` with the lowest values, ascending, int64 [R, L, H, v]; ``_NOWHERE`` pads short rows."""
    order = eviction_order(keys, [s.candidates for s in sizes], overrides)
    most = max(s.victims for s in sizes)
    uneven = any(s.victims != most for s in sizes)
    if order is keys and not uneven and keys.device.type == "cpu":
        lowest = cpu.lowest_draws(keys, most)
        if lowest is not None:
            return lowest
    victims = order.topk(most, dim=-1, largest=False, sorted=uneven).indices
    if uneven:  # a row takes its own number of victims
        beyond = torch.arange(most, device=keys.device) >= _column([s.victims for s in sizes], keys.device)
        victims = victims.masked_fill(beyond, _NOWHERE)
    return victims.sort(dim=-1).values


def _pair(victims: Tensor, turns: Sequence[bool], sizes: Sequence[_Sizes]) -> tuple[Tensor, Tensor]:
    """Source and destination ranks of any round or turn, from its victims' ranks [R, L, H, v]."""
    device = victims.device
    total = _column([s.total for s in sizes], device)
    count = _column([s.freed for s in sizes], device)
    last = _column([max(s.total - 1, 0) for s in sizes], device)
    turned = None
    holes = victims
    if any(turns):
        turned = torch.tensor(turns, device=device).view(-1, 1, 1, 1)
        holes = _with_fresh_slots(victims, sizes)
        # A turn frees the first ranks: seen from the other end, it frees the last, as a round does.
        holes = torch.where(turned & (holes < _NOWHERE), total - 1 - holes, holes)
    holes = holes.sort(dim=-1).values
    width = holes.shape[-1]
    column = torch.arange(width, device=device)
    first_freed = total - count
    # Mark the freed slots whose entry is a victim; the others hold survivors, which must move.
    inside = (holes >= first_freed) & (holes < total)
    dead = torch.zeros((*holes.shape[:-1], width + 1), dtype=torch.int64, device=device)
    dead.scatter_(-1, torch.where(inside, holes - first_freed, width), 1)
    dead = dead[..., :width]
    padded = any(s.freed != width for s in sizes)
    if padded:
        dead = dead.masked_fill(column >= count, 1)
    # Stable partition without a sort: survivors first, both groups in rank order. Behind the
    # survivors come the dead freed slots, which are exactly the holes left over: moves onto themselves.
    alive_before = (1 - dead).cumsum(-1)
    place = torch.where(dead == 0, alive_before - 1, alive_before[..., -1:] + column - alive_before)
    source = torch.zeros_like(holes).scatter_(-1, place, column.expand_as(holes)) + first_freed
    if padded:
        spare = column >= count  # such moves go from a freed slot, never the target of a real move, onto itself
        source, holes = torch.where(spare, last, source), torch.where(spare, last, holes)
    if turned is not None:
        source, holes = (torch.where(turned, last - ranks, ranks) for ranks in (source, holes))
    return source, holes


def _with_fresh_slots(victims: Tensor, sizes: Sequence[_Sizes]) -> Tensor:
    """Append the empty slots behind the candidates, which are filled like victims' slots."""
    most = max(s.fresh for s in sizes)
    offset = torch.arange(most, device=victims.device)
    first = _column([s.total - s.fresh for s in sizes], victims.device)
    fresh = _column([s.fresh for s in sizes], victims.device)
    slots = torch.where(offset < fresh, first + offset, _NOWHERE)
    return torch.cat([victims, slots.expand(*victims.shape[:-1], most)], dim=-1)
