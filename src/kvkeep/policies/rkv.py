"""R-KV (arXiv 2505.24133)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..budget import Budget
from ..signals import KEYS, POSITIONS, QUERIES, LayerView, RoundView
from .base import Policy
from .options import choice, fraction, odd, whole
from .snapkv import smoothed

_TILE = 1 << 24  # cosines at a time, all rows and heads together: 64 MiB
_MOST = 256  # lines of a tile: more gain nothing


@dataclass(frozen=True)
class RKV(Policy):
    """Keep what the newest queries attend to unless other keys of the head say the same.

    Z = lam * importance - (1 - lam) * redundancy.

    Importance: the largest logit of the group's query heads, softmax over everything cached before the window, mean
    over queries, maximum of neighbours. Redundancy: mean cosine of an entry's key with all keys of its head, softmax
    over entries. An entry does not count against itself, nor against its newest likeness: each entry i has one cosine
    taken out, that with the newest entry whose cosine with i exceeds ``threshold``.

    In the authors' code an entry that nothing resembles takes out its cosine with the oldest entry instead, an accident
    that ``variant="official"`` keeps. The paper's text exempts the ``beta`` newest likenesses and has no such accident.
    The code takes keys of the first batch row for all rows and builds all S x S cosines at once; here each row has its
    own and they are made tile by tile, so results differ with the tile's size by rounding alone.

    Args:
        lam: weight of importance. 0.1 in the paper and its README, 0.07 as the code's default, 0.5 as chosen by VaSE.
        threshold: cosine above which keys are alike.
        kernel: positions that share their importance (odd).
        queries: newest queries that vote.
        variant: ``official`` or ``paper``, see above.
        beta: newest likenesses exempted by ``paper``; neither source gives its value, and the code's is 1.
    """

    lam: float = 0.1
    threshold: float = 0.5
    kernel: int = 7
    queries: int = 8
    variant: Literal["official", "paper"] = "official"
    beta: int = 1

    name: ClassVar[str] = "rkv"
    rule: ClassVar[str] = "keep what the newest queries attend to and no other key repeats"
    paper: ClassVar[str] = "R-KV (arXiv 2505.24133)"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS, KEYS, QUERIES})
    published_protection: ClassVar[str] = "none"
    prefill_window: ClassVar[int] = 8

    def __post_init__(self) -> None:
        fraction(self, "lam")
        fraction(self, "threshold")
        odd(self, "kernel")
        whole(self, "queries", 1)
        choice(self, "variant", "official", "paper")
        whole(self, "beta", 1)
        if self.variant == "official" and self.beta != 1:
            raise ValueError(f"beta={self.beta} goes with variant='paper': the official code exempts one")

    def query_window(self, budget: Budget) -> int:
        return self.queries

    def schedule(self, budget: int) -> dict[str, Any]:
        return {"buffer": 128, "window": 8}

    def score(self, view: RoundView) -> Tensor:
        return view.by_layer(self._layer)

    def _layer(self, layer: LayerView) -> Tensor:
        scores = self.lam * self.importance(layer)
        if self.lam < 1:
            scores -= (1 - self.lam) * self.redundancy(layer)
        return layer.candidates(scores)

    def importance(self, layer: LayerView) -> Tensor:
        """float32 [R, H, N] by ascending position, zeros in the window."""
        assert layer.queries is not None  # declared in `signals`
        assert layer.query_positions is not None
        queries, at = layer.queries[:, :, -self.queries :], layer.query_positions[:, -self.queries :]
        logits = layer.logits(queries, at).amax(dim=2)  # [R, H, w, N]
        votes = layer.weights(logits, among=layer.filled & ~layer.window).sum(dim=2)
        votes /= (at >= 0).sum(-1)[:, None, None]  # a short row has fewer queries
        return smoothed(layer.ascending(votes), self.kernel, "max")

    def redundancy(self, layer: LayerView) -> Tensor:
        """float32 [R, H, N] by ascending position, zeros where nothing is cached."""
        keys = layer.keys.float()
        unit = keys / keys.norm(dim=-1, keepdim=True).clamp_min(1e-8)
        unit.masked_fill_(~layer.filled[..., None], 0.0)  # cosine 0 with everything: neither counts nor is counted
        unit = unit.gather(2, layer.order[..., None].expand_as(unit))
        count = layer.filled.sum(-1, keepdim=True)  # [R, 1, 1]
        there = torch.arange(unit.shape[2], device=unit.device) < count
        mean = self._sums(unit) / count
        return mean.masked_fill_(~there, float("-inf")).softmax(-1)

    def _sums(self, unit: Tensor) -> Tensor:
        """Cosines that count against each entry, summed, [R, H, N]; ``unit`` [R, H, N, D] is ascending."""
        rows, heads, n, width = unit.shape
        lines = unit.reshape(rows * heads, n, width)
        across, place = lines.transpose(1, 2), torch.arange(n, device=unit.device, dtype=torch.float32)
        size = max(1, min(_MOST, _TILE // (rows * heads * n)))
        sums = lines.new_zeros(rows * heads, n)
        for first in range(0, n, size):
            cosines = lines[:, first : first + size] @ across  # [R H, size, N]; line i is entry first + i
            cosines.diagonal(first, 1, 2).zero_()
            if self.variant == "official":  # without likeness the maximum is 0, the oldest
                newest = torch.where(cosines > self.threshold, place, 0.0).amax(-1, keepdim=True)
                cosines.scatter_(-1, newest.long(), 0.0)
            else:
                newest = torch.where(cosines > self.threshold, place, -1.0).topk(min(self.beta, n), dim=-1).values
                at = newest.clamp_min(0).long()
                # Added, not assigned: entry 0 stands for "none" too, and there nothing must be taken out.
                cosines.scatter_add_(-1, at, torch.where(newest >= 0, -cosines.gather(-1, at), 0.0))
            sums += cosines.sum(dim=1)
        return sums.view(rows, heads, n)
