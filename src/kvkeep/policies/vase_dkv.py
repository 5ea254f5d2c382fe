"""VaSE-DKV (arXiv 2606.03928)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..draws import apart, round_words, uniforms
from ..signals import KEYS, POSITIONS, VALUES, LayerView, RoundView
from .base import Policy
from .options import whole

PURPOSE = 2  # of its draws, see kvkeep.draws.apart


@dataclass(frozen=True)
class VaSEDKV(Policy):
    """Keep entries whose keys and values are long in a few random directions, drawn anew at every round.

    With a Gaussian sketch G [D, rank], N(0, 1) / sqrt(rank), one for each row and layer, the score of an entry is
    |kG|^2 |vG|^2, divided by its sum over everything cached before the window; the first tokens (sinks) score 1. No
    queries are needed. Chance is in the sketch alone: given it, the highest scores stay. The authors' code draws it
    from torch's global generator; here draws are kvkeep's.

    Args:
        rank: directions of the sketch.
        sinks: candidates at positions below this stay.
    """

    rank: int = 20
    sinks: int = 4

    name: ClassVar[str] = "vase-dkv"
    rule: ClassVar[str] = "keep keys and values that are long in random directions"
    paper: ClassVar[str] = "VaSE-DKV (arXiv 2606.03928)"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS, KEYS, VALUES})
    published_protection: ClassVar[str] = "none"

    def __post_init__(self) -> None:
        whole(self, "rank", 1)
        whole(self, "sinks", 0)

    def schedule(self, budget: int) -> dict[str, Any]:
        return {"buffer": 64, "window": 64}

    def score(self, view: RoundView) -> Tensor:
        one_head = torch.zeros_like(view.heads[:1])  # heads of a layer share the sketch, whoever holds them
        words = apart(round_words(view.seed, view.streams, view.layers, one_head, view.rounds), PURPOSE)[..., 0]

        def of_layer(layer: LayerView) -> Tensor:
            assert layer.values is not None
            width = max(layer.keys.shape[-1], layer.values.shape[-1])
            return self.scores(layer, self.sketch(words[:, layer.index], width).to(layer.keys.device))

        return view.by_layer(of_layer)

    def sketch(self, words: Tensor, width: int) -> Tensor:
        """G, float32 [R, width, rank], from words [R]; each number from two uniform ones, after Box and Muller."""
        n = width * self.rank
        drawn = uniforms(words, torch.arange(2 * n, dtype=torch.int32, device=words.device))
        first, second = drawn[:, :n], drawn[:, n:]
        normal = (-2 * first.log()).sqrt() * (2 * math.pi * second).cos()
        return normal.view(-1, width, self.rank) / math.sqrt(self.rank)

    def scores(self, layer: LayerView, sketch: Tensor) -> Tensor:
        """float32 [R, H, C] of a layer's candidates, given its sketch [R, D, rank]."""
        assert layer.values is not None
        keys, values = (  # squared lengths [R, H, N]
            (vectors.float() @ sketch[:, None, : vectors.shape[-1]]).square().sum(-1)
            for vectors in (layer.keys, layer.values)
        )
        scores = keys * values
        past = scores.masked_fill(~(layer.filled & ~layer.window), 0.0)
        scores /= past.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return layer.chosen(scores.masked_fill_(layer.positions < self.sinks, 1.0))
