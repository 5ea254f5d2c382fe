"""What a policy sees of a round on vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..layout import Round
from ..policies import shared_axes
from ..signals import RoundView
from .config import Serving

if TYPE_CHECKING:
    from .requests import Tracked


@dataclass(frozen=True, eq=False)
class Heads:
    """The KV heads that a worker holds of the layers that share a block table.

    Attributes:
        layers: int64 [L], global layer numbers.
        heads: int64 [H], global KV head numbers.
        model_heads: KV heads of a layer of the whole model.
    """

    layers: Tensor
    heads: Tensor
    model_heads: int

    @classmethod
    def any(cls) -> Heads:
        """For policies whose heads all keep the same."""
        one = torch.zeros(1, dtype=torch.int64)
        return cls(one, one, 1)

    def shape(self, serving: Serving) -> tuple[int, int]:
        """(L, H) of kept sets; 1 where heads share them."""
        return shared_axes(serving.policy.scope, len(self.layers), len(self.heads))


def look(
    serving: Serving,
    requests: Sequence[Tracked],
    events: Sequence[Round],
    where: Heads,
    positions: Tensor | None = None,
) -> RoundView:
    """What the policy sees of a round.

    Args:
        serving: the engine's settings.
        requests: whose rounds they are.
        events: one a request.
        where: layers and heads.
        positions: int32 [R, L, H, C] ascending, for policies that ask for them.
    """
    return RoundView(
        seed=serving.settings.seed,
        streams=torch.tensor([r.stream for r in requests], dtype=torch.int64),
        rounds=torch.tensor([e.number for e in events]),
        layers=where.layers,
        heads=where.heads,
        model_heads=where.model_heads,
        candidates=max(e.candidates for e in events),
        positions=positions,
        kept=tuple(e.window_from + e.window - e.victims for e in events),
        window=tuple(e.newest + e.window for e in events),
        protected=tuple(e.start for e in events),
    )
