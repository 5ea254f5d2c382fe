"""What a policy can ask to see.

A policy names its signals; an engine collects those and no others. ``RandomAttention`` names none,
so it costs nothing beyond its draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: int32 [R, L, H, C]: logical position of each candidate. The candidates then come in ascending
#: position, whatever slots they lie in. Kept in a position store that moves with the entries.
POSITIONS = "positions"

#: Keys after RoPE of everything cached, layer by layer, through :attr:`RoundView.layer`. Candidates come as with
#: :data:`POSITIONS`.
KEYS = "keys"

#: Queries after RoPE of the newest tokens, layer by layer, beside the keys. The policy says how many.
QUERIES = "queries"

KNOWN = frozenset({POSITIONS, KEYS, QUERIES})


@dataclass(frozen=True)
class LayerView:
    """What one evicting layer holds at a round: R rows, H KV heads, N slots, of which a row may fill fewer.

    Slot order means nothing; :meth:`ascending` and :meth:`candidates` turn a number a slot into numbers by position.

    Attributes:
        keys: [R, H, N, D] after RoPE, by slot.
        positions: int32 [R, H, N], by slot.
        filled: bool [R, 1, N], slots that hold an entry.
        window: bool [R, 1, N], those of the newest entries, which stay whatever they score.
        order: int64 [R, H, N], slots by ascending position, empty ones last.
        places: int64 [R, H, C], where in ``order`` each candidate stands.
        queries: [R, H_q, w, D] after RoPE, oldest first, or None.
        query_positions: int64 [R, w], or None; negative where a row is shorter than w.
        scaling: what the layer multiplies scores with; None: D^-0.5.
    """

    keys: Tensor
    positions: Tensor
    filled: Tensor
    window: Tensor
    order: Tensor
    places: Tensor
    queries: Tensor | None = None
    query_positions: Tensor | None = None
    scaling: float | None = None

    def ascending(self, values: Tensor) -> Tensor:
        """[R, H, ..., N] by slot -> by ascending position."""
        rows, heads, slots = self.order.shape
        between = (1,) * (values.dim() - 3)
        return values.gather(-1, self.order.view(rows, heads, *between, slots).expand_as(values))

    def candidates(self, values: Tensor) -> Tensor:
        """[R, H, N] by ascending position -> [R, H, C] of the candidates alone."""
        return values.gather(-1, self.places)

    def attention(self) -> Tensor:
        """Attention weights of the newest queries, float32 [R, H, G, w, N] by slot (G query heads a KV head).

        Causal; a query that sees nothing any more, or that a row is too short for, gets zeros. N counts what is still
        cached: weights of evicted entries are gone from the denominator, as in every method that scores from its
        cache. So are sinks that a model learns beside its keys; soft caps are left out.
        """
        if self.queries is None or self.query_positions is None:
            raise ValueError("attention() needs the signal 'queries': add it to the policy's signals")
        rows, heads, slots, width = self.keys.shape
        scaling = width**-0.5 if self.scaling is None else self.scaling
        q = self.queries.float().mul(scaling).reshape(rows, heads, -1, width)  # a group's queries under one another
        scores = q @ self.keys.float().transpose(-1, -2)
        scores = scores.view(rows, heads, -1, self.queries.shape[2], slots)
        at = self.query_positions[:, None, :, None]  # [R, 1, w, 1]
        seen = (self.positions[:, :, None] <= at) & self.filled[:, :, None]  # [R, H, w, N]
        weights = scores.masked_fill_(~seen[:, :, None], float("-inf")).softmax(-1)
        return weights.masked_fill_(~seen.any(-1, keepdim=True)[:, :, None], 0.0)


@dataclass(frozen=True)
class RoundView:
    """What a policy sees of a round: R rows, L evicting layers, H KV heads, C candidates.

    Attributes:
        seed: the run's seed.
        streams: int64 [R], tells requests apart.
        rounds: int64 [R], number of each row's round.
        layers: int64 [L], global layer numbers.
        heads: int64 [H], global KV head numbers.
        model_heads: KV heads of a layer of the whole model, of which ``heads`` may be a part.
        candidates: C, the widest row's number of candidates; narrower rows are padded behind.
        positions: int32 [R, L, H, C] ascending (axes that the policy's scope shares are 1), or None.
        layer: gives what the i-th evicting layer holds, or None if no signal asks for it.
    """

    seed: int
    streams: Tensor
    rounds: Tensor
    layers: Tensor
    heads: Tensor
    model_heads: int
    candidates: int
    positions: Tensor | None = None
    layer: Callable[[int], LayerView] | None = None

    def by_layer(self, score: Callable[[LayerView], Tensor]) -> Tensor:
        """Score layer by layer, so that temporaries are those of one layer.

        Args:
            score: float [R, H, C] of a layer's candidates.

        Returns:
            float32 [R, L, H, C].
        """
        if self.layer is None:
            raise ValueError("by_layer() needs the signal 'keys' or 'queries': add it to the policy's signals")
        scores = [score(self.layer(i)).float() for i in range(len(self.layers))]
        return torch.stack([s.to(self.layers.device) for s in scores], dim=1)  # layers may lie on several devices
