"""Rounds of the transformers engine: what the policy sees, and the moves in every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layout import Round, Row
from ..plan import Moves, Overrides, plan
from ..policies import Policy
from ..positions import PositionStore, flat_slots, move_entries, windows
from ..settings import Settings
from ..signals import POSITIONS, RoundView
from .layer import EvictingLayer
from .model import ModelInfo
from .streams import Streams


@dataclass(frozen=True)
class Logged:
    """One event of a row, enough to replay it: what happened, tokens seen before, tokens of the turn."""

    event: Round | None
    seen: int
    slot: int = 0
    turn: int = 0


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
        self._keep: Tensor | None = None
        self._forget: Tensor | None = None
        self.begin_request()

    def begin_request(self) -> None:
        """Forget the last request's rows."""
        self.moved = False
        self.store: PositionStore | None = None
        self._log: list[list[Logged]] = []

    def begin(self, rows: int, device: torch.device) -> None:
        """Make ready for a batch of ``rows`` rows."""
        self.device = device
        self._log = [[] for _ in range(rows)]
        if self._tracks:
            self.store = PositionStore(rows, *self._shape, 1, device)

    @property
    def _tracks(self) -> bool:
        """Whether slots' positions must be known at every round."""
        return (
            POSITIONS in self.policy.signals
            or bool(self.settings.protection.pins)
            or self.settings.track_positions
            or self._keep is not None
            or self._forget is not None
        )

    @property
    def _shape(self) -> tuple[int, int]:
        """Layers and heads of the position store: 1 where kept sets are shared."""
        scope = "head" if self._keep is not None or self._forget is not None else self.policy.scope
        return 1 if scope == "model" else len(self.layers), self.info.heads if scope == "head" else 1

    @property
    def positions_nbytes(self) -> int:
        """Bytes of the position store."""
        return 0 if self.store is None else self.store.nbytes

    def override(self, keep: Tensor | None, forget: Tensor | None) -> None:
        """See :meth:`EvictCache.override`."""
        if any(self._log):
            raise ValueError("override() comes before the first round: call reset() first")
        for mask in (keep, forget):
            if mask is not None and (mask.dim() != 4 or mask.dtype != torch.bool):
                raise ValueError(
                    f"masks are bool [rows, layers, heads, positions], got {tuple(mask.shape)} {mask.dtype}"
                )
        self._keep, self._forget = keep, forget
        if self._log and self._tracks:
            self.store = PositionStore(len(self._log), *self._shape, 1, self.device)

    def select(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self._log = [list(self._log[i]) for i in order]
        if self.store is not None:
            self.store.data = self.store.data[list(order)].contiguous()
            self.store.filled = [self.store.filled[i] for i in order]
        if any(m is not None and m.shape[0] > 1 for m in (self._keep, self._forget)):
            self._keep, self._forget = (
                m if m is None or m.shape[0] == 1 else m[list(order)] for m in (self._keep, self._forget)
            )

    # ---- a round --------------------------------------------------------------------------------

    def run(self, events: dict[int, Round], rows: Sequence[Row], streams: Streams, spare: int) -> None:
        """Carry out what happens to each row (row number -> event) in every evicting layer.

        Args:
            events: what happens to each row.
            rows: all rows, before the events.
            streams: their streams.
            spare: slots a new turn needs beyond those in use.
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
        view, order = self.look(which, what, streams.get(len(rows))[which], self.store)
        moves = self.plan(which, what, view, order, self.policy.keys(view), self.store)
        self.move(which, what, moves)
        for i, event in events.items():
            self._log[i].append(Logged(event, rows[i].seen))
        self.moved = True

    def shrink(self, slots: int | None) -> None:
        """Give back what a prompt longer than K + r took, once it has been cut down."""
        if slots is None:
            return
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

    def look(
        self, which: list[int], events: list[Round], streams: Tensor, store: PositionStore | None
    ) -> tuple[RoundView, Tensor | None]:
        """What the policy sees of a round.

        Args:
            which: rows.
            events: what happens to each of them.
            streams: int64 [R], their streams.
            store: positions of all rows, if they are tracked.

        Returns:
            The view, and the rank of each of its candidates where these come by position.
        """
        device = self.device if store is None else store.data.device
        positions = order = None
        if store is not None and POSITIONS in self.policy.signals:
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
        positions = view.positions
        if positions is None and store is not None:
            positions = store.candidates(which, events)
        overrides = self._overrides(which, positions)
        if overrides is not None:
            shapes = [keys.shape[:3]] + [m.shape[:3] for m in (overrides.keep, overrides.forget) if m is not None]
            keys = keys.expand(*torch.broadcast_shapes(*shapes), keys.shape[-1])
            order = None if order is None else order.expand(*keys.shape)
        return plan(keys, events, self.policy.slots_per_unit, overrides, order)

    def move(self, which: list[int], events: list[Round], moves: Moves) -> None:
        """Carry out a plan in every layer: moves, and the window before a turn or after a round."""
        turns = [(i, e) for i, e in zip(which, events, strict=True) if e.turn]
        rounds = [(i, e) for i, e in zip(which, events, strict=True) if not e.turn]
        assert self.layers[0].k is not None
        batch, heads, capacity, _ = self.layers[0].k.shape
        before, after = (windows([i for i, _ in x], [e for _, e in x], batch) for x in (turns, rounds))
        rows = torch.tensor(which, device=moves.src.device)
        sources = flat_slots(moves.src, rows, heads, capacity)  # [L or 1, R * H * m]
        targets = flat_slots(moves.dst, rows, heads, capacity)
        for i, layer in enumerate(self.layers):
            source, target = sources[min(i, len(sources) - 1)], targets[min(i, len(targets) - 1)]
            for tensor in (layer.k, layer.v):
                assert tensor is not None
                move_entries(tensor, source.to(tensor.device), target.to(tensor.device), before, after)
        if self.store is not None:
            self.store.apply(which, events, moves)

    def _overrides(self, which: list[int], positions: Tensor | None) -> Overrides | None:
        pins = self.settings.protection.pins
        if positions is None or not (pins or self._keep is not None or self._forget is not None):
            return None
        keep = _at(self._keep, which, positions)
        for first, end in pins:
            pinned = (positions >= first) & (positions < end)
            keep = pinned if keep is None else keep | pinned
        return Overrides(keep, _at(self._forget, which, positions))

    # ---- kept positions -------------------------------------------------------------------------

    def kept_positions(self, row: int, rows: Sequence[Row], streams: Streams) -> Tensor:
        """Ascending positions of one row's entries, int32 [L, H, n] on the CPU."""
        state = rows[row]
        store, at = self.store, row
        if store is None:
            store, at = self._replay(row, state, streams), 0
        store.resize(max(store.data.shape[-1], state.cached))
        store.fill(at, state.cached, state.seen)
        kept = store.data[at, :, :, : state.cached].to("cpu")
        return kept.sort(dim=-1).values.expand(len(self.layers), self.info.heads, -1)

    def _replay(self, row: int, state: Row, streams: Streams) -> PositionStore:
        """Draw a row's rounds again, on positions alone: draws are pure functions, so nothing was recorded."""
        store = PositionStore(1, *self._shape, 1, torch.device("cpu"))
        stream = streams.get(row + 1)[row : row + 1].to("cpu") if self._log[row] else None
        for entry in self._log[row]:
            event = entry.event
            if event is None:
                store.turn(0, entry.slot, entry.turn, entry.seen)
                continue
            cached = event.window_from + event.window
            store.resize(max(store.data.shape[-1], cached + event.fresh))
            store.fill(0, cached, entry.seen)
            assert stream is not None
            view, order = self.look([0], [event], stream, store)
            moves = self.plan([0], [event], view, order, self.policy.keys(view), store)
            store.apply([0], [event], moves)
        return store


def _at(mask: Tensor | None, which: list[int], positions: Tensor) -> Tensor | None:
    """``mask`` [B, L, H, T] read at ``positions`` [R, L, H, C]; False beyond T."""
    if mask is None:
        return None
    mask = mask.to(positions.device)
    mask = mask if mask.shape[0] == 1 else mask[which]
    shape = torch.broadcast_shapes(mask.shape[:3], positions.shape[:3])
    inside = positions < mask.shape[-1]
    index = positions.clamp(0, mask.shape[-1] - 1).to(torch.int64).expand(*shape, -1)
    return mask.expand(*shape, -1).gather(-1, index) & inside
