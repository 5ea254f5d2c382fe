"""VaSE-AttnV (arXiv 2606.03928)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..budget import Budget
from ..draws import apart, round_words, uniforms
from ..signals import KEYS, POSITIONS, QUERIES, VALUES, LayerView, RoundView
from .base import Policy
from .options import fraction, odd, whole
from .snapkv import smoothed

PURPOSE = 1  # of its draws, see kvkeep.draws.apart
_RESERVED, _WEIGHTLESS = 2.0**20, -(2.0**20)  # far from any logarithm of a float32 and any Gumbel draw


@dataclass(frozen=True)
class VaSE(Policy):
    """Keep the entries of widest value vectors; draw the rest in proportion to attention.

    The range of a value vector is its largest component minus its smallest. The ``reserve * K`` candidates of widest
    range stay, the first tokens (sinks) before all others. The rest is drawn without replacement, fresh for each row,
    layer and KV head, with probability proportional to the attention of the newest queries: softmax over everything
    cached before the window, mean over queries and group, average of neighbours. Taking the top of log weight + Gumbel
    noise is that draw.

    Entries of weight 0 stay only by the reserve, or when nothing else is left to evict. The authors' code draws from
    torch's global generator and has no seed; here draws are kvkeep's. There all entries before the window compete; here
    protected ones do not, but they take part in the softmax as they do there.

    Args:
        reserve: share of K, the prompt included, that is kept by range; 0.25 in all of the authors' scripts.
        sinks: candidates at positions below this stay, even if the reserve is smaller.
        queries: newest queries that vote.
        kernel: positions that share their attention (odd).
    """

    reserve: float = 0.25
    sinks: int = 4
    queries: int = 64
    kernel: int = 5

    name: ClassVar[str] = "vase"
    rule: ClassVar[str] = "keep values of wide range; draw the rest by attention"
    paper: ClassVar[str] = "VaSE-AttnV (arXiv 2606.03928)"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS, KEYS, VALUES, QUERIES})
    published_protection: ClassVar[str] = "none"
    prefill_window: ClassVar[int] = 64

    def __post_init__(self) -> None:
        fraction(self, "reserve")
        whole(self, "sinks", 0)
        whole(self, "queries", 1)
        odd(self, "kernel")

    def query_window(self, budget: Budget) -> int:
        return self.queries

    def schedule(self, budget: int) -> dict[str, Any]:
        return {"buffer": 64, "window": 64}

    def score(self, view: RoundView) -> Tensor:
        words = apart(round_words(view.seed, view.streams, view.layers, view.heads, view.rounds), PURPOSE)
        columns = torch.arange(view.candidates, dtype=torch.int32, device=words.device)
        large = torch.tensor([int(self.reserve * kept + 1e-9) for kept in view.kept], device=words.device)

        def of_layer(layer: LayerView) -> Tensor:
            weights = layer.candidates(self.weights(layer))
            device = weights.device
            gumbel = -(-uniforms(words[:, layer.index], columns).log()).log()
            scores = torch.where(weights > 0, weights.log() + gumbel.to(device), _WEIGHTLESS)
            rank, count = self.by_range(layer, large.to(device))
            return torch.where(rank >= rank.shape[-1] - count, _RESERVED + rank, scores)

        return view.by_layer(of_layer)

    def weights(self, layer: LayerView) -> Tensor:
        """Smoothed attention, float32 [R, H, N] by ascending position; zeros in the window lend nothing."""
        assert layer.queries is not None  # declared in `signals`
        assert layer.query_positions is not None
        logits = layer.logits(layer.queries[:, :, -self.queries :], layer.query_positions[:, -self.queries :])
        votes = layer.weights(logits, among=layer.filled & ~layer.window).mean(dim=(2, 3))
        return smoothed(layer.ascending(votes), self.kernel, "avg")

    def by_range(self, layer: LayerView, large: Tensor) -> tuple[Tensor, Tensor]:
        """Candidates in ascending order of range, sinks last.

        Args:
            layer: what it holds.
            large: int64 [R], how many each row reserves.

        Returns:
            Rank of each candidate, int64 [R, H, C], and how many of the highest are reserved, [R, H, 1].
        """
        assert layer.values is not None
        spread = layer.chosen(layer.values.amax(-1).float() - layer.values.amin(-1).float())
        there = layer.there()
        sinks = (layer.chosen(layer.positions) < self.sinks) & there
        spread = spread.masked_fill(sinks, float("inf")).masked_fill(~there, float("-inf"))
        order = spread.argsort(dim=-1, stable=True)  # of equals the newer stays, as in the planner
        columns = torch.arange(order.shape[-1], device=order.device).expand_as(order)
        rank = torch.empty_like(order).scatter_(-1, order, columns)
        return rank, torch.maximum(large[:, None, None], sinks.sum(-1, keepdim=True))
