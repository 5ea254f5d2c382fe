"""What a policy can ask to see.

A policy names its signals; an engine collects those and no others. ``RandomAttention`` names none,
so it costs nothing beyond its draws.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

#: int32 [R, L, H, C]: logical position of each candidate. The candidates then come in ascending
#: position, whatever slots they lie in. Kept in a position store that moves with the entries.
POSITIONS = "positions"

KNOWN = frozenset({POSITIONS})


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
    """

    seed: int
    streams: Tensor
    rounds: Tensor
    layers: Tensor
    heads: Tensor
    model_heads: int
    candidates: int
    positions: Tensor | None = None
