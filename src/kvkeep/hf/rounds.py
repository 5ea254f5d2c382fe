"""Rounds of the transformers engine: what the policy sees, and the moves in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..layout import Round, Row
from ..plan import Moves
from ..policies import Policy, shared_axes
from ..positions import PositionStore
from ..settings import Settings
from ..signals import OF_LAYERS
from .layer import EvictingLayer
from .looks import Looks
from .masks import Masks
from .model import ModelInfo
from .moves import move_layers
from .replay import Logged, replay
from .split import split_round
from .steps import bound
from .views import LayerViews
from .watch import Watch

_AHEAD = 8  # rounds planned at once, at most
_AHEAD_BYTES = 2 << 20  # of their draws
_Events = tuple[tuple[int, ...], tuple[Round, ...]]  # rows and what happens to them


class Rounds(Looks):
    """Runs rounds on the storage of all evicting layers.

    Where the policy gives layers budgets of their own, each layer of a row has events of its own; planner and position
    store then take every (row, layer) for a row of one layer.

    Args:
        policy: the method.
        settings: seed, protection and whether positions are tracked.
        info: layers and heads of the model.
        layers: the evicting layers.
        watch: collects what the policy asks to see.
    """

    def __init__(
        self, policy: Policy, settings: Settings, info: ModelInfo, layers: list[EvictingLayer], watch: Watch
    ) -> None:
        self.policy, self.settings, self.info, self.layers, self.watch = policy, settings, info, layers, watch
        self.device = torch.device("cpu")
        self.masks = Masks(len(layers), info.heads, settings.protection.pins, policy.slots_per_unit)
        self.begin_request()

    def begin_request(self) -> None:
        """Forget the last request's rows."""
        self.masks.restore()
        self.moved = False
        self.store: PositionStore | None = None
        self._log: list[list[Logged]] = []
        self._ahead: dict[_Events, Moves] = {}
        self.watch.begin(0)

    def begin(self, rows: int, device: torch.device) -> None:
        """Make ready for a batch of ``rows`` rows."""
        self.device = device
        self._log = [[] for _ in range(rows)]
        self.masks.check_rows(rows)
        self.store = self._new_store(rows) if self._tracks else None
        self.watch.begin(rows)

    def _new_store(self, rows: int) -> PositionStore:
        layers, heads = self.shape
        if self.policy.splits:
            return PositionStore(rows * layers, 1, heads, 1, self.device)
        return PositionStore(rows, layers, heads, 1, self.device)

    @property
    def _tracks(self) -> bool:
        """Whether slots' positions must be known at every round."""
        wanted = self.settings.track_positions or not self.policy.content_free
        return wanted or bool(self.policy.signals) or bool(self.masks)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and heads of the position store: 1 where kept sets are shared."""
        return shared_axes("head" if self.masks.per_head else self.policy.scope, len(self.layers), self.info.heads)

    @property
    def state_nbytes(self) -> int:
        """Bytes of what the policy needs to remember: moves planned ahead, signals."""
        plans = [t.untyped_storage() for m in self._ahead.values() for t in (m.src, m.dst)]
        shared = {s.data_ptr(): s.nbytes() for s in plans}  # plans of several rounds share memory
        return self.watch.nbytes + sum(shared.values())

    @property
    def positions_nbytes(self) -> int:
        """Bytes of the position store."""
        return 0 if self.store is None else self.store.nbytes

    def override(self, keep: Tensor | None, forget: Tensor | None) -> None:
        """See :meth:`EvictCache.override`."""
        if any(self._log):
            raise ValueError("override() comes before the first round: call reset() first")
        if self.settings.prefill_keep is not None and keep is not None:
            raise ValueError(
                "keep masks and prefill_keep do not go together: pin positions (protect='pin:3-7') instead"
            )
        if self.policy.splits and (keep is not None or forget is not None):
            raise ValueError(f"policy {self.policy.name!r} gives layers their own budgets, which masks may not fit")
        self.masks.set(keep, forget)
        self._ahead = {}
        if self._log and self._tracks:
            self.store = self._new_store(len(self._log))

    def select(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self._log = [list(self._log[i]) for i in order]
        self._ahead = {}
        if self.store is not None:
            self.store.select(self.stored(order))
        self.masks.select(order)
        self.watch.select(order)

    def stored(self, which: Sequence[int]) -> list[int]:
        """Rows of the position store that these batch rows have."""
        if not self.policy.splits:
            return list(which)
        layers = len(self.layers)
        return [i * layers + j for i in which for j in range(layers)]

    # ---- a round --------------------------------------------------------------------------------

    def run(
        self, events: dict[int, Round], rows: Sequence[Row], streams: Tensor, spare: int, columns: int = 0
    ) -> dict[int, tuple[int, ...]]:
        """Carry out what happens to each row (row number -> event) in every evicting layer.

        Args:
            events: what happens to each row.
            rows: all rows, before the events.
            streams: int64 [B], their streams.
            spare: slots a new turn needs beyond those in use.
            columns: seen so far.

        Returns:
            What each layer holds afterwards, for rows whose layers differ.
        """
        self.watch.settle(anybody=True)
        which, what = list(events), list(events.values())
        self._make_room(which, rows, spare)
        if self.policy.splits:
            held = split_round(self, which, what, [rows[i] for i in which], streams[which], columns)
        else:
            held = {}
            if (tuple(which), tuple(what)) not in self._ahead:
                concerned = [rows[i] for i in which]
                layers = self.views(which, [[e] for e in what], concerned, columns)
                seen = [row.seen for row in concerned]
                self._ahead = self._plan_ahead(which, what, streams[which], layers, seen)
            self.move(which, what, self._ahead[(tuple(which), tuple(what))])
        for i, event in events.items():
            self._log[i].append(Logged(event, rows[i].seen, stream=int(streams[i])))
        self.moved = True
        return held

    def _make_room(self, which: Sequence[int], rows: Sequence[Row], spare: int) -> None:
        layers = len(self.layers)
        most = [max(row.by_layer(layers)[i] for row in rows) + spare for i in range(layers)]
        if spare:
            for layer, slots in zip(self.layers, most, strict=True):
                if layer.capacity < slots:
                    layer.resize(slots)
        if self.store is not None:
            self.store.resize(max(*most, *(layer.capacity for layer in self.layers)))
            self._fill(self.store, which, rows)

    def _fill(self, store: PositionStore, which: Sequence[int], rows: Sequence[Row]) -> None:
        """Note the positions of the rows' newest tokens."""
        for i in which:
            held = rows[i].by_layer(len(self.layers)) if self.policy.splits else (rows[i].cached,)
            for j, cached in zip(self.stored([i]), held, strict=True):
                store.fill(j, cached, rows[i].seen)

    def views(
        self, which: Sequence[int], events: Sequence[Sequence[Round]], rows: Sequence[Row], columns: int
    ) -> LayerViews | None:
        """What the evicting layers hold, if the policy asks for it; ``rows`` are those that ``events`` concern."""
        if self.store is None or not OF_LAYERS & self.policy.signals:
            return None
        positions = self.store.data[self.stored(which)]
        if self.policy.splits:
            positions = positions.view(len(which), len(self.layers), *positions.shape[2:])
        return LayerViews(which, events, rows, self.layers, positions, self.watch, columns)

    def shrink(self, rows: Sequence[Row]) -> None:
        """Give back what prompts longer than K + r took, once they have been cut down."""
        for i, layer in enumerate(self.layers):
            seen = [row.at_layer(i) for row in rows]
            slots = max(bound(seen) or 0, *(row.cached for row in seen))
            # Budgets of layers that go up and down with every round must not cost a copy of the layer each time.
            slack = self.settings.buffer if self.policy.splits else 0
            if layer.capacity > slots + slack:
                layer.resize(slots)
        slots = max(layer.capacity for layer in self.layers)
        if self.store is not None and self.store.data.shape[-1] > slots:
            self.store.resize(slots)

    def note_turn(self, i: int, row: Row, n: int) -> None:
        """A new turn of ``n`` tokens is about to be written to row ``i``."""
        if row.turn_slot != row.cached:  # else it is like any other newest tokens
            if self.store is not None:
                for j in self.stored([i]):
                    self.store.turn(j, row.turn_slot, n, row.seen)
            self._log[i].append(Logged(None, row.seen, row.turn_slot, n))

    def ahead(self, events: list[Round]) -> int:
        """Rounds to plan at once, this one included: several if nothing but their number tells them apart.

        Draws are known long before they are needed, and a round of one request is so little work
        that most of its time goes into starting operations.
        """
        alike = self.settings.growth is None and all(
            not e.turn and not e.prefill and e.victims == self.settings.buffer for e in events
        )
        if self.policy.signals or self.masks or not alike:
            return 1
        draws = 4 * len(events) * len(self.layers) * self.info.heads * max(e.candidates for e in events)
        return max(1, min(_AHEAD, _AHEAD_BYTES // max(1, draws)))

    def _plan_ahead(
        self, which: list[int], events: list[Round], streams: Tensor, layers: LayerViews | None, seen: list[int]
    ) -> dict[_Events, Moves]:
        """Moves of this round and, as :meth:`ahead` says, of the same rows' next rounds."""
        count = self.ahead(events)
        coming = [[replace(e, number=e.number + i) for e in events] for i in range(count)]
        every = [e for events in coming for e in events]
        view, order = self.look(which * count, every, streams.repeat(count), self.store, layers, seen * count)
        moves = self.plan(which * count, every, view, order, self.policy.keys(view), self.store)
        parts = zip(moves.src.split(len(which)), moves.dst.split(len(which)), strict=True)
        return {
            (tuple(which), tuple(e)): Moves(src, dst, moves.run) for e, (src, dst) in zip(coming, parts, strict=True)
        }

    def move(self, which: list[int], events: list[Round], moves: Moves) -> None:
        """Carry out a plan in every layer: moves, and the window before a turn or after a round."""
        move_layers(self.layers, which, events, moves)
        if self.store is not None:
            self.store.apply(which, events, moves)

    # ---- kept positions -------------------------------------------------------------------------

    def kept_positions(self, row: int, rows: Sequence[Row]) -> Tensor:
        """Ascending positions of one row's entries, int32 [L, H, n] on the CPU; -1 fills up layers that hold fewer."""
        if not 0 <= row < len(rows):
            raise ValueError(f"there is no row {row}: the cache holds {len(rows)} rows")
        state = rows[row]
        store, at = self.store, row
        if store is None:
            store, at = replay(self, self._log[row]), 0
        layers = len(self.layers)
        store.resize(max(store.data.shape[-1], *state.by_layer(layers)))
        if self.policy.splits:
            return self._kept_by_layer(store, row, state)
        store.fill(at, state.cached, state.seen)
        kept = store.data[at, :, :, : state.cached].to("cpu")
        return kept.sort(dim=-1).values.expand(layers, self.info.heads, -1)

    def _kept_by_layer(self, store: PositionStore, row: int, state: Row) -> Tensor:
        held = state.by_layer(len(self.layers))
        kept = torch.full((len(held), self.info.heads, max(held)), -1, dtype=torch.int32)
        for i, (j, cached) in enumerate(zip(self.stored([row]), held, strict=True)):
            store.fill(j, cached, state.seen)
            kept[i, :, :cached] = store.data[j, 0, :, :cached].sort(dim=-1).values.to("cpu")
        return kept
