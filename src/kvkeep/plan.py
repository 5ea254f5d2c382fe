"""From scores or draws to moves: one plan for all rows, layers and heads of a round.

The r lowest keys of a head are its victims. Survivors in the slots to be freed move into the
victims' slots, the i-th survivor to the i-th victim, both in rank order: at most r moves a head,
where compaction would copy K. Everything is a fixed number of tensor operations without
``nonzero`` or ``item``; rows that need fewer moves are padded with moves of a slot onto itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cpu import lowest_draws as _lowest_draws
from .cpu import pair
from .layout import Round

_RANK_BITS = 24  # candidates of one head and round that can be told apart: 16.7 million
_CLASS = 1 << 58


@dataclass(frozen=True)
class Moves:
    """Slots to copy, ``src`` to ``dst``; read all sources before writing.

    Shapes are int64 [R, L, H, m]; L or H is 1 where layers or heads share their draw.
    A move whose ``src`` equals its ``dst`` is padding.
    """

    src: Tensor
    dst: Tensor

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
    """int64 keys with the order of ``keys`` (int32 or float32; NaN is refused by its engine check)."""
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
        rank_of = torch.zeros_like(order)
        if overrides.forget is not None:
            rank_of = torch.where(overrides.forget, -_CLASS, rank_of)
        if overrides.keep is not None:
            rank_of = torch.where(overrides.keep, _CLASS, rank_of)
        order = order + rank_of
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
    sizes = [(e.candidates // unit, e.victims // unit, e.fresh // unit) for e in events]
    order = eviction_order(keys, [c for c, _, _ in sizes], overrides)
    most = max(v for _, v, _ in sizes)
    uneven = any(v != most for _, v, _ in sizes)
    alike = not any(e.turn for e in events) and len({e.start for e in events}) == len(set(sizes)) == 1
    if order is keys and alike and ranks is None and unit == 1 and keys.device.type == "cpu":
        lowest = _lowest_draws(keys, most)
        if lowest is not None:
            first = events[0].start
            return Moves(pair(lowest, sizes[0][0] - most) + first, lowest + first)
    victims = order.topk(most, dim=-1, largest=False, sorted=uneven).indices
    if ranks is not None:
        victims = ranks.gather(-1, victims)
    if uneven:  # a row takes its own number of victims; the rest sort behind everything
        beyond = torch.arange(most, device=keys.device) >= _column([v for _, v, _ in sizes], keys.device)
        victims = victims.masked_fill(beyond, 1 << 40)
    src, dst = _pair(victims, events, sizes)
    if unit > 1:
        inside = torch.arange(unit, device=keys.device)
        src = (src.unsqueeze(-1) * unit + inside).flatten(-2)
        dst = (dst.unsqueeze(-1) * unit + inside).flatten(-2)
    start = _column([e.start for e in events], keys.device)
    return Moves(src + start, dst + start)


def _pair(victims: Tensor, events: Sequence[Round], sizes: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor]:
    """Source and destination ranks for unsorted victim ranks [R, L, H, v]."""
    device = victims.device
    total = _column([c + f for c, _, f in sizes], device)  # ranks, fresh slots included
    count = _column([v + f for _, v, f in sizes], device)  # slots to free
    last = _column([max(c + f - 1, 0) for c, _, f in sizes], device)
    turned = None
    if any(e.turn for e in events):
        turned = torch.tensor([e.turn for e in events], device=device).view(-1, 1, 1, 1)
    holes = victims
    if turned is not None:
        holes = _with_fresh_slots(victims, sizes)
        # A turn frees the first ranks: seen from the other end, it frees the last, as a round does.
        holes = torch.where(turned & (holes < 1 << 40), total - 1 - holes, holes)
    holes = holes.sort(dim=-1).values
    width = holes.shape[-1]
    column = torch.arange(width, device=device)
    first_freed = total - count
    # Mark the freed slots whose entry is a victim; the others hold survivors, which must move.
    inside = (holes >= first_freed) & (holes < total)
    dead = torch.zeros((*holes.shape[:-1], width + 1), dtype=torch.int64, device=device)
    dead.scatter_(-1, torch.where(inside, holes - first_freed, width), 1)
    dead = dead[..., :width]
    padded = any(v + f != width for _, v, f in sizes)
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


def _with_fresh_slots(victims: Tensor, sizes: Sequence[tuple[int, int, int]]) -> Tensor:
    """Append the empty slots behind the candidates, which are filled like victims' slots."""
    most = max(f for _, _, f in sizes)
    offset = torch.arange(most, device=victims.device)
    candidates = _column([c for c, _, _ in sizes], victims.device)
    fresh = _column([f for _, _, f in sizes], victims.device)
    slots = torch.where(offset < fresh, candidates + offset, 1 << 40)
    return torch.cat([victims, slots.expand(*victims.shape[:-1], most)], dim=-1)
