"""What the policy sees of a round, and the plan made of what it answers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import Round
from ..plan import Moves, Overrides, plan
from ..policies import Policy, shared_axes
from ..positions import PositionStore
from ..settings import Settings
from ..signals import RoundView
from .layer import EvictingLayer
from .masks import Masks
from .model import ModelInfo
from .views import LayerViews


class Looks:
    """The part of :class:`~kvkeep.hf.rounds.Rounds` between the engine and the policy."""

    policy: Policy
    settings: Settings
    info: ModelInfo
    layers: list[EvictingLayer]
    masks: Masks
    device: torch.device

    def look(
        self,
        which: list[int],
        events: list[Round],
        streams: Tensor,
        store: PositionStore | None,
        layers: LayerViews | None = None,
        seen: Sequence[int] = (),
    ) -> tuple[RoundView, Tensor | None]:
        """What the policy sees of a round.

        Args:
            which: rows.
            events: what happens to each of them.
            streams: int64 [R], their streams.
            store: positions of all rows, if they are tracked.
            layers: what the evicting layers hold, for policies that look at it.
            seen: tokens of each of them.

        Returns:
            The view, and the rank of each of its candidates where these come by position.
        """
        positions = None
        if store is not None and self.policy.signals:  # all signals tell candidates apart by position
            positions = store.candidates(which, events)
        return self.show(events, streams, positions, layers, seen)

    def show(
        self,
        events: Sequence[Round],
        streams: Tensor,
        positions: Tensor | None,
        layers: LayerViews | None,
        seen: Sequence[int],
    ) -> tuple[RoundView, Tensor | None]:
        """See :meth:`look`; ``positions`` int32 [R, L, H, C] are the candidates', in rank order."""
        device = self.device if positions is None else positions.device
        order = None
        if positions is not None:
            positions, order = positions.sort(dim=-1, stable=True)
        view = RoundView(
            seed=self.settings.seed,
            streams=streams.to(device),
            rounds=torch.tensor([e.number for e in events], device=device),
            layers=torch.tensor(self.info.evicting, device=device),
            heads=torch.arange(self.info.heads, device=device),
            model_heads=self.info.heads,
            candidates=max(e.candidates for e in events) if positions is None else positions.shape[-1],
            positions=positions,
            layer=layers,
            seen=tuple(seen),
            kept=tuple(e.window_from + e.window - e.victims for e in events),
            window=tuple(e.newest + e.window for e in events),
            protected=tuple(e.start for e in events),
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
        self.check(keys, view)
        positions = view.positions
        if positions is None and store is not None and self.masks:
            positions = store.candidates(which, events)
        keys, order, overrides = self.overridden(which, positions, keys, order)
        return plan(keys, events, self.policy.slots_per_unit, overrides, order)

    def overridden(
        self, which: list[int], positions: Tensor | None, keys: Tensor, order: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Overrides | None]:
        """Keys and ranks as wide as the masks that outrank them, and these masks at the candidates."""
        overrides = self.masks.at(which, positions) if positions is not None and self.masks else None
        if overrides is not None:
            shapes = [keys.shape[:3]] + [m.shape[:3] for m in (overrides.keep, overrides.forget) if m is not None]
            keys = keys.expand(*torch.broadcast_shapes(*shapes), keys.shape[-1])
            order = None if order is None else order.expand(*keys.shape)
        return keys, order, overrides

    def check(self, keys: Tensor, view: RoundView) -> None:
        """Refuse what a policy returned if it has the wrong shape, or NaN."""
        scope = self.policy.scope
        layers, heads = shared_axes(scope, len(self.layers), self.info.heads)
        wanted = [len(view.streams), layers, heads, view.candidates // self.policy.slots_per_unit]
        whole = [wanted[0], len(self.layers), self.info.heads, wanted[3]]  # what masks tell apart, a policy may too
        if list(keys.shape) != wanted and not (self.masks.per_head and list(keys.shape) == whole):
            raise ValueError(
                f"policy {self.policy.name!r} returned keys of shape {list(keys.shape)}, expected {wanted} for its "
                f"scope, {scope!r}"
            )
        # On a GPU the check would wait for the device at every round.
        if keys.device.type == "cpu" and keys.is_floating_point() and bool(keys.isnan().any()):
            raise ValueError(f"policy {self.policy.name!r} returned NaN scores")
