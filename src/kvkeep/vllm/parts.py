"""Attention metadata of a step that may have several phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from torch import Tensor

from .layouts import Layout
from .rounds import LayerMoves

M = TypeVar("M")


@dataclass
class Part(Generic[M]):
    """A phase, ready for the attention kernels.

    Attributes:
        meta: what the backend's own kernels want to know of it.
        tokens: int64 indices of its tokens in the batch; None: all of them.
        moves: what moves in each layer before its tokens are written there.
        layout: of the caches.
        count: told seconds and moved entries of each layer's rounds.
    """

    meta: M
    tokens: Tensor | None
    moves: Mapping[str, list[LayerMoves]]
    layout: Layout
    count: Callable[[float, int], None] | None = None

    def move(self, layer: str, cache: Tensor) -> None:
        """Run the rounds that are due in this layer."""
        due = self.moves.get(layer)
        if not due:
            return
        begin = time.perf_counter()
        for moves in due:
            moves.run(self.layout, cache)
        if self.count is not None:
            self.count(time.perf_counter() - begin, sum(len(moves.heads) for moves in due))


@dataclass
class KeepMetadata(Generic[M]):
    """Attention metadata of a step: its parts, in order."""

    parts: list[Part[M]] = field(default_factory=list)

    @classmethod
    def whole(cls, meta: M, layout: Layout) -> KeepMetadata[M]:
        """One part in which nothing moves."""
        return cls([Part(meta, None, {}, layout)])
