"""H2O (arXiv 2306.14048): heavy hitters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..signals import ATTENTION, POSITIONS, LayerView, RoundView
from .base import Policy
from .options import choice


@dataclass(frozen=True)
class H2O(Policy):
    """Keep what has received most attention since it was cached, from every query.

    Several rules are sold under this name, so the variant is an option that results should always show. The paper and
    its code add attention up, which favours entries that have been there for long. The paper keeps as many newest
    entries as heavy hitters; that is the budget's window (:meth:`schedule`).

    The code scores each query head by itself. A KV head here has one kept set, so its query heads' sums are added.

    Args:
        count: ``cumulative`` (paper and code), or ``mean``: divided by the number of queries that could see the entry,
            its own included, which takes the advantage of age away (kvpress' ObservedAttentionPress).
    """

    count: Literal["cumulative", "mean"] = "cumulative"

    name: ClassVar[str] = "h2o"
    rule: ClassVar[str] = "keep what got most attention so far (count=cumulative: a plain sum)"
    paper: ClassVar[str] = "H2O (arXiv 2306.14048)"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS, ATTENTION})
    published_protection: ClassVar[str] = "none"
    shown: ClassVar[tuple[str, ...]] = ("count",)  # options that names of arms should spell out, default or not

    def __post_init__(self) -> None:
        choice(self, "count", "cumulative", "mean")

    def schedule(self, budget: int) -> dict[str, Any]:
        return {"buffer": 1, "window": budget // 2}  # every step; half newest, half heavy hitters

    def score(self, view: RoundView) -> Tensor:
        seen = torch.tensor(view.seen, device=view.layers.device)[:, None, None]
        return view.by_layer(lambda layer: self._layer(layer, seen))

    def _layer(self, layer: LayerView, seen: Tensor) -> Tensor:
        assert layer.received is not None  # declared in `signals`
        received = layer.chosen(layer.received)
        if self.count == "cumulative":
            return received
        queries = seen.to(received.device) - layer.chosen(layer.positions)
        return received / queries.clamp_min(1)  # padding has any position
