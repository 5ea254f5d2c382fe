"""TOVA (arXiv 2401.06104): token omission via attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from ..budget import Budget
from ..signals import KEYS, POSITIONS, QUERIES, LayerView, RoundView
from .base import Policy, PolicyScope


@dataclass(frozen=True)
class TOVA(Policy):
    """Keep what the newest query attends to, on average over all heads of the layer, which share one kept set.

    The paper evicts one entry a step and exempts nothing, not even the newest entry (:meth:`schedule`). kvpress never
    lets the newest go.
    """

    name: ClassVar[str] = "tova"
    rule: ClassVar[str] = "keep what the newest query attends to, one set a layer"
    paper: ClassVar[str] = "TOVA (arXiv 2401.06104)"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS, KEYS, QUERIES})
    published_protection: ClassVar[str] = "none"
    prefill_window: ClassVar[int] = 1

    @property
    def scope(self) -> PolicyScope:
        return "layer"

    def schedule(self, budget: int) -> dict[str, Any]:
        return {"buffer": 1, "window": 0}

    def query_window(self, budget: Budget) -> int:
        return 1

    def score(self, view: RoundView) -> Tensor:
        return view.by_layer(self._layer)

    def _layer(self, layer: LayerView) -> Tensor:
        assert layer.queries is not None  # declared in `signals`
        assert layer.query_positions is not None
        logits = layer.logits(layer.queries[:, :, -1:], layer.query_positions[:, -1:])
        votes = layer.weights(logits).mean(dim=(2, 3))  # [R, H, N]
        # A position lies in another slot in each head, so heads are averaged only in order of position.
        return layer.chosen(votes).mean(dim=1, keepdim=True)
