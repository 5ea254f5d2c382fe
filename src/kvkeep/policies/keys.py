"""Two cheap scores that see keys alone: what a clever method should beat besides a fair die."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..signals import KEYS, POSITIONS, LayerView, RoundView
from .base import Policy


@dataclass(frozen=True)
class Knorm(Policy):
    """Keep the keys of lowest norm."""

    name: ClassVar[str] = "knorm"
    rule: ClassVar[str] = "keep keys of low norm"
    paper: ClassVar[str] = "L2 norm (arXiv 2406.11430)"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS, KEYS})

    def score(self, view: RoundView) -> Tensor:
        return view.by_layer(self._layer)

    def _layer(self, layer: LayerView) -> Tensor:
        return layer.candidates(layer.ascending(-layer.keys.float().norm(dim=-1)))


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Keep the keys least like the mean direction of all keys of their head."""

    name: ClassVar[str] = "keydiff"
    rule: ClassVar[str] = "keep keys unlike their mean"
    paper: ClassVar[str] = "KeyDiff (arXiv 2504.15364)"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS, KEYS})

    def score(self, view: RoundView) -> Tensor:
        return view.by_layer(self._layer)

    def _layer(self, layer: LayerView) -> Tensor:
        unit = layer.keys.float()
        unit = unit / unit.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        unit = unit.masked_fill(~layer.filled[..., None], 0.0)
        anchor = unit.sum(dim=2, keepdim=True)  # [R, H, 1, D]; its length does not change a cosine
        anchor = anchor / anchor.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        return layer.candidates(layer.ascending(-(unit * anchor).sum(-1)))
