"""PyramidKV (arXiv 2406.02069)."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from torch import Tensor

from ..signals import RoundView
from .snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """SnapKV with more entries in the first layers, fewer in the last, decreasing linearly.

    The last layer gets 1 / beta of the mean budget, the first as much more than the mean as the last gets less, but not
    more than there is: then the last gets more. This counts what is left to choose; protected entries and the window
    are the same in every layer and come on top (the paper knows only the window).

    The first layer cannot keep more than it holds, so it gains at most r entries a decoding round, and the pyramid
    takes several rounds to grow steep. The paper compresses a prompt once.

    Args:
        beta: how steep, at least 1 (1: all layers alike).
        queries, kernel, pool, group, reduce: those of :class:`SnapKV`.
    """

    beta: float = 20.0

    name: ClassVar[str] = "pyramidkv"
    rule: ClassVar[str] = "SnapKV, more entries in the first layers"
    paper: ClassVar[str] = "PyramidKV (arXiv 2406.02069)"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.beta, bool) or not isinstance(self.beta, int | float) or not 1 <= self.beta < inf:
            raise ValueError(f"beta must be a number of at least 1 (the steepness), got {self.beta!r}")

    @property
    def splits(self) -> bool:
        return True

    def allot(self, view: RoundView, keys: Tensor) -> Tensor:
        assert view.layer is not None
        first = view.layer(0)  # the layer that is asked for most
        assert first.eligible is not None
        there = first.eligible.sum(dim=(1, 2)).to(view.layers.device, torch.float64)  # [R]
        stay = first.filled.sum(dim=(1, 2)).to(there) - there
        kept = torch.tensor(view.kept, dtype=torch.float64, device=there.device)
        free = kept - stay
        # Where everything fits, `there` is the least of the three, and no layer gets more than another.
        top = torch.maximum(free, torch.minimum(free * (2 - 1 / self.beta), there))
        down = torch.linspace(1, -1, len(view.layers), dtype=torch.float64, device=there.device)
        down = down - down.mean()  # of a single layer it is 0
        return kept[:, None] + down * (top - free)[:, None]
