"""SnapKV (arXiv 2404.14469), used at every round of decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor

from ..budget import Budget
from ..signals import KEYS, POSITIONS, QUERIES, LayerView, RoundView
from .base import Policy
from .options import choice, odd, whole


@dataclass(frozen=True)
class SnapKV(Policy):
    """Keep what the newest queries attend to, smoothed over neighbouring positions.

    The paper compresses a prompt once. At a decoding round the newest w queries take the place of the prompt's last
    ones, as in arXiv 2609.03430 (mean over queries, average pool of 5, mean over the group of query heads). The window
    counts in the softmax but lends its neighbours nothing when scores are pooled.

    Args:
        queries: how many of the newest queries vote; 0: as many as the budget's window, at least one round's.
        kernel: positions that share their scores (odd).
        pool: ``avg`` or ``max`` (the paper's text).
        group: how the query heads of a KV head vote together: ``mean`` or ``max``. The paper's code lets each query
            head choose by itself, which a cache with fewer KV heads cannot hold.
        reduce: how queries vote together: ``mean``, or ``sum`` (the paper's code), which orders entries alike.
    """

    queries: int = 0
    kernel: int = 5
    pool: Literal["avg", "max"] = "avg"
    group: Literal["mean", "max"] = "mean"
    reduce: Literal["mean", "sum"] = "mean"

    name: ClassVar[str] = "snapkv"
    rule: ClassVar[str] = "keep what the newest queries attend to"
    paper: ClassVar[str] = "SnapKV (arXiv 2404.14469)"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS, KEYS, QUERIES})
    published_protection: ClassVar[str] = "none"
    prefill_window: ClassVar[int] = 64

    def __post_init__(self) -> None:
        whole(self, "queries", 0)
        odd(self, "kernel")
        if self.pool not in ("avg", "max") or self.group not in ("mean", "max"):
            raise ValueError(f"pool is avg or max and group mean or max, got {self.pool!r} and {self.group!r}")
        choice(self, "reduce", "mean", "sum")

    def query_window(self, budget: Budget) -> int:
        return self.queries or super().query_window(budget)

    def score(self, view: RoundView) -> Tensor:
        return view.by_layer(self._layer)

    def _layer(self, layer: LayerView) -> Tensor:
        weights = layer.attention()
        votes = weights.mean(dim=3) if self.reduce == "mean" else weights.sum(dim=3)  # [R, H, G, N]
        votes = layer.ascending(votes.masked_fill_(layer.window[:, :, None], 0.0))
        pooled = smoothed(votes, self.kernel, self.pool)
        return layer.candidates(pooled.mean(dim=2) if self.group == "mean" else pooled.amax(dim=2))


def smoothed(votes: Tensor, kernel: int, pool: str) -> Tensor:
    """Average or maximum of ``kernel`` neighbours along the last axis; zeros at both ends, as in the papers' codes."""
    lines = votes.flatten(0, -2)
    if pool == "max":
        return F.max_pool1d(lines, kernel, stride=1, padding=kernel // 2).view_as(votes)
    return F.avg_pool1d(lines, kernel, stride=1, padding=kernel // 2).view_as(votes)
