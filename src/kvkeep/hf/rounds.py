"""Rounds of the transformers engine: what the policy sees, and the moves in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..layout import Round, Row
from ..plan import Moves, plan
from ..policies import Policy
from ..positions import PositionStore, first_slots, flat_slots, move_entries, windows
from ..settings import Settings
from ..signals import KEYS, QUERIES, RoundView
from .layer import EvictingLayer
from .masks import Masks
from .model import ModelInfo
from .queries import QueryRing
from .replay import Logged, replay
from .steps import bound
from .streams import Streams
from .views import LayerViews

_AHEAD = 8  # rounds planned at once, at most
_AHEAD_BYTES = 2 << 20  # of their draws
_Events = tuple[tuple[int, ...], tuple[Round, ...]]  # rows and what happens to them


class Rounds:
    """Runs rounds on the storage of all evicting layers.

    Args:
        policy: the method.
        settings: seed, protection and whether positions are tracked.
        info: layers and heads of the model.
        layers: the evicting layers.
    """

    def __init__(self, policy: Policy, settings: Settings, info: ModelInfo, layers: list[EvictingLayer]) -> None:
        self.policy, self.settings, self.info, self.layers = policy, settings, info, layers
        self.device = torch.device("cpu")
        self.masks = Masks(len(layers), info.heads, settings.protection.pins, policy.slots_per_unit)
        self.begin_request()

    def begin_request(self) -> None:
        """Forget the last request's rows."""
        self.masks.restore()
        self.moved = False
        self.store: PositionStore | None = None
        self.queries: QueryRing | None = None
        self._log: list[list[Logged]] = []
        self._ahead: dict[_Events, Moves] = {}

    def begin(self, rows: int, device: torch.device) -> None:
        """Make ready for a batch of ``rows`` rows."""
        self.device = device
        self._log = [[] for _ in range(rows)]
        self.masks.check_rows(rows)
        if self._tracks:
            self.store = PositionStore(rows, *self.shape, 1, device)
        budget = self.settings.make_budget()
        if QUERIES in self.policy.signals and budget is not None:
            self.queries = QueryRing(self.policy.query_window(budget))

    @property
    def _tracks(self) -> bool:
        """Whether slots' positions must be known at every round."""
        wanted = self.settings.track_positions or not self.policy.content_free
        return wanted or bool(self.policy.signals) or bool(self.masks)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and heads of the position store: 1 where kept sets are shared."""
        scope = "head" if self.masks.per_head else self.policy.scope
        return 1 if scope == "model" else len(self.layers), self.info.heads if scope == "head" else 1

    @property
    def state_nbytes(self) -> int:
        """Bytes of what the policy needs to remember: moves planned ahead, queries."""
        plans = [t.untyped_storage() for m in self._ahead.values() for t in (m.src, m.dst)]
        ring = 0 if self.queries is None else self.queries.nbytes
        return ring + sum({s.data_ptr(): s.nbytes() for s in plans}.values())  # plans of several rounds share memory

    @property
    def positions_nbytes(self) -> int:
        """Bytes of the position store."""
        return 0 if self.store is None else self.store.nbytes

    def override(self, keep: Tensor | None, forget: Tensor | None) -> None:
        """See :meth:`EvictCache.override`."""
        if any(self._log):
            raise ValueError("override() comes before the first round: call reset() first")
        self.masks.set(keep, forget)
        self._ahead = {}
        if self._log and self._tracks:
            self.store = PositionStore(len(self._log), *self.shape, 1, self.device)

    def select(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self._log = [list(self._log[i]) for i in order]
        self._ahead = {}
        if self.store is not None:
            with torch.inference_mode(False):
                self.store.data = self.store.data[list(order)].contiguous()
            self.store.filled = [self.store.filled[i] for i in order]
        self.masks.select(order)
        if self.queries is not None:
            self.queries.select(order)

    # ---- a round --------------------------------------------------------------------------------

    def run(
        self, events: dict[int, Round], rows: Sequence[Row], streams: Streams, spare: int, columns: int = 0
    ) -> None:
        """Carry out what happens to each row (row number -> event) in every evicting layer.

        Args:
            events: what happens to each row.
            rows: all rows, before the events.
            streams: their streams.
            spare: slots a new turn needs beyond those in use.
            columns: seen so far.
        """
        which, what = list(events), list(events.values())
        most = max(row.cached for row in rows) + spare
        if spare:
            for layer in self.layers:
                if layer.capacity < most:
                    layer.resize(most)
        if self.store is not None:
            self.store.resize(max(most, self.layers[0].capacity))
            for i in which:
                self.store.fill(i, rows[i].cached, rows[i].seen)
        if (tuple(which), tuple(what)) not in self._ahead:
            layers = None
            if self.store is not None and {KEYS, QUERIES} & self.policy.signals:
                concerned = [rows[i] for i in which]
                layers = LayerViews(which, what, concerned, self.layers, self.store, self.queries, columns)
            self._ahead = self._plan_ahead(which, what, streams.get(len(rows))[which], layers)
        self.move(which, what, self._ahead[(tuple(which), tuple(what))])
        for i, event in events.items():
            self._log[i].append(Logged(event, rows[i].seen))
        self.moved = True

    def shrink(self, rows: Sequence[Row]) -> None:
        """Give back what prompts longer than K + r took, once they have been cut down."""
        limit = bound(rows)
        if limit is None:
            return
        slots = max(limit, max(row.cached for row in rows))
        for layer in self.layers:
            if layer.capacity > slots:
                layer.resize(slots)
        if self.store is not None and self.store.data.shape[-1] > slots:
            self.store.resize(slots)

    def note_turn(self, i: int, row: Row, n: int) -> None:
        """A new turn of ``n`` tokens is about to be written to row ``i``."""
        if row.turn_slot != row.cached:  # else it is like any other newest tokens
            if self.store is not None:
                self.store.turn(i, row.turn_slot, n, row.seen)
            self._log[i].append(Logged(None, row.seen, row.turn_slot, n))

    def ahead(self, events: list[Round]) -> int:
        """Rounds to plan at once, this one included: several if nothing but their number tells them apart.

        Draws are known long before they are needed, and a round of one request is so little work
        that most of its time goes into starting operations.
        """
        alike = self.settings.growth is None and all(not e.turn and e.victims == self.settings.buffer for e in events)
        if self.policy.signals or self.masks or not alike:
            return 1
        draws = 4 * len(events) * len(self.layers) * self.info.heads * max(e.candidates for e in events)
        return max(1, min(_AHEAD, _AHEAD_BYTES // max(1, draws)))

    def _plan_ahead(
        self, which: list[int], events: list[Round], streams: Tensor, layers: LayerViews | None
    ) -> dict[_Events, Moves]:
        """Moves of this round and, as :meth:`ahead` says, of the same rows' next rounds."""
        count = self.ahead(events)
        coming = [[replace(e, number=e.number + i) for e in events] for i in range(count)]
        every = [e for events in coming for e in events]
        view, order = self.look(which * count, every, streams.repeat(count), self.store, layers)
        moves = self.plan(which * count, every, view, order, self.policy.keys(view), self.store)
        parts = zip(moves.src.split(len(which)), moves.dst.split(len(which)), strict=True)
        return {
            (tuple(which), tuple(e)): Moves(src, dst, moves.run) for e, (src, dst) in zip(coming, parts, strict=True)
        }

    def look(
        self,
        which: list[int],
        events: list[Round],
        streams: Tensor,
        store: PositionStore | None,
        layers: LayerViews | None = None,
    ) -> tuple[RoundView, Tensor | None]:
        """What the policy sees of a round.

        Args:
            which: rows.
            events: what happens to each of them.
            streams: int64 [R], their streams.
            store: positions of all rows, if they are tracked.
            layers: what the evicting layers hold, for policies that look at it.

        Returns:
            The view, and the rank of each of its candidates where these come by position.
        """
        device = self.device if store is None else store.data.device
        positions = order = None
        if store is not None and self.policy.signals:  # all signals tell candidates apart by position
            positions, order = store.candidates(which, events).sort(dim=-1, stable=True)
        view = RoundView(
            seed=self.settings.seed,
            streams=streams.to(device),
            rounds=torch.tensor([e.number for e in events], device=device),
            layers=torch.tensor(self.info.evicting, device=device),
            heads=torch.arange(self.info.heads, device=device),
            model_heads=self.info.heads,
            candidates=max(e.candidates for e in events),
            positions=positions,
            layer=layers,
        )
        return view, order

    def plan(
        self,
        which: list[int],
        events: list[Round],
        view: RoundView,
        order: Tensor | None,
        keys: Tensor,
        store: PositionStore | None,
    ) -> Moves:
        """Moves of a round, from the policy's ``keys`` for what :meth:`look` showed it."""
        self._check(keys, view)
        positions = view.positions
        if positions is None and store is not None and self.masks:
            positions = store.candidates(which, events)
        overrides = self.masks.at(which, positions) if positions is not None and self.masks else None
        if overrides is not None:
            shapes = [keys.shape[:3]] + [m.shape[:3] for m in (overrides.keep, overrides.forget) if m is not None]
            keys = keys.expand(*torch.broadcast_shapes(*shapes), keys.shape[-1])
            order = None if order is None else order.expand(*keys.shape)
        return plan(keys, events, self.policy.slots_per_unit, overrides, order)

    def _check(self, keys: Tensor, view: RoundView) -> None:
        wanted = (len(view.streams), len(self.layers), self.info.heads, view.candidates // self.policy.slots_per_unit)
        fits = keys.dim() == 4 and keys.shape[0] == wanted[0] and keys.shape[3] == wanted[3]
        if not fits or keys.shape[1] not in (1, wanted[1]) or keys.shape[2] not in (1, wanted[2]):
            raise ValueError(
                f"policy {self.policy.name!r} returned keys of shape {list(keys.shape)}, expected {list(wanted)} "
                "(layers and heads may be 1)"
            )
        # On a GPU the check would wait for the device at every round.
        if keys.device.type == "cpu" and keys.is_floating_point() and bool(keys.isnan().any()):
            raise ValueError(f"policy {self.policy.name!r} returned NaN scores")

    def move(self, which: list[int], events: list[Round], moves: Moves) -> None:
        """Carry out a plan in every layer: moves, and the window before a turn or after a round."""
        assert self.layers[0].k is not None
        batch, heads, capacity, _ = self.layers[0].k.shape
        before, after = windows(which, events, batch, turns=True), windows(which, events, batch, turns=False)
        first = first_slots(which, heads, capacity, moves.src.device)
        # One index a layer, or a single one for all.
        targets = flat_slots(moves.dst, first).unbind()
        sources: Sequence[Tensor | slice] = [slice(moves.run, (moves.run or 0) + moves.dst.shape[-1])]
        if moves.run is None or len(which) < batch:
            sources = flat_slots(moves.src, first).unbind()
        for i, layer in enumerate(self.layers):
            source, target = sources[i % len(sources)], targets[i % len(targets)]
            for tensor in (layer.k, layer.v):
                assert tensor is not None
                if target.device != tensor.device:  # layers spread over several devices
                    source = source if isinstance(source, slice) else source.to(tensor.device)
                    target = target.to(tensor.device)
                move_entries(tensor, source, target, before, after)
        if self.store is not None:
            self.store.apply(which, events, moves)

    # ---- kept positions -------------------------------------------------------------------------

    def kept_positions(self, row: int, rows: Sequence[Row], streams: Streams) -> Tensor:
        """Ascending positions of one row's entries, int32 [L, H, n] on the CPU."""
        if not 0 <= row < len(rows):
            raise ValueError(f"there is no row {row}: the cache holds {len(rows)} rows")
        state = rows[row]
        store, at = self.store, row
        if store is None:
            stream = streams.get(row + 1)[row : row + 1] if self._log[row] else None
            store, at = replay(self, self._log[row], stream), 0
        store.resize(max(store.data.shape[-1], state.cached))
        store.fill(at, state.cached, state.seen)
        kept = store.data[at, :, :, : state.cached].to("cpu")
        return kept.sort(dim=-1).values.expand(len(self.layers), self.info.heads, -1)
