"""What must hold after every event, for every head: shared by the tests of rounds and of turns."""

from __future__ import annotations

from torch import Tensor

from kvkeep.layout import Round
from kvkeep.plan import Moves
from reference import Slots, naive_event, naive_victims, real_moves


def check_event(
    slots: Slots, which: list[int], events: list[Round], keys: Tensor, ranks: Tensor | None, moves: Moves, old: Tensor
) -> None:
    """Everything that must hold after any event, for each head of each row."""
    unit = slots.policy.slots_per_unit
    src, dst = (x.expand(len(which), slots.L, slots.H, -1) for x in (moves.src, moves.dst))
    every = keys.expand(len(which), slots.L, slots.H, -1)
    moves = Moves(src, dst)
    for j, (i, event) in enumerate(zip(which, events, strict=True)):
        row, window = slots.rows[i], event.window
        assert row.cached <= slots.size
        for layer in range(slots.L):
            for head in range(slots.H):
                before, after = old[i, layer, head].tolist(), slots.pos[i, layer, head].tolist()
                values = every[j, layer, head, : event.candidates // unit].tolist()
                order = None if ranks is None else ranks.expand(-1, slots.L, slots.H, -1)[j, layer, head].tolist()
                dead = naive_victims(values, event.victims // unit, order)
                dead = [u * unit + k for u in dead for k in range(unit)]
                # the real slots equal the naive plan's, also those that nobody may touch
                assert after == naive_event(before, event, dead)
                moved = real_moves(moves, j, layer, head)
                padding = {int(d) for s, d in zip(src[j, layer, head], dst[j, layer, head], strict=True) if s == d}
                assert len(moved) <= (event.freed if event.turn else event.victims)
                assert len(moved) == int((src[j, layer, head] != dst[j, layer, head]).sum())  # no target twice
                assert not padding & set(moved)  # an engine may write padding in any order
                if not event.turn:
                    held = after[: row.cached]
                    assert len(set(held)) == len(held) == len(before[: row.cached + event.victims]) - event.victims
                    assert set(held) <= set(before)
                    assert held[: row.protected] == before[: row.protected]
                    assert held[len(held) - window :] == before[row.cached + event.victims - window :][:window]
                    behind = event.start + event.candidates
                    assert set(before[behind : behind + event.newest]) <= set(held)


def check_row(slots: Slots, i: int, turns: list[tuple[int, int]] | None = None) -> None:
    """What a head holds right after a round, whatever happened before (turns: (first position, n))."""
    row = slots.rows[i]
    assert row.budget is not None
    turn_positions = [p for first, n in turns or [] for p in range(first, first + n)]
    prefix = [*range(row.first_protected), *turn_positions] if row.protection.share else [*range(row.protected)]
    newest = [p for p in range(row.seen) if p not in prefix and p not in turn_positions]
    for head in slots.kept(i).flatten(0, 1).tolist():
        assert len(set(head)) == len(head) == row.cached == row.budget.kept(row.trace_rounds - 1)
        assert head[: row.protected] == prefix
        assert set(range(max(0, row.seen - row.budget.window), row.seen)) <= set(head)
        ordered = max(0, row.budget.window - row.budget.every)  # what the next window will hold as well
        assert head[len(head) - ordered :] == newest[len(newest) - ordered :]
        assert min(head) >= 0
        assert max(head) < row.seen
