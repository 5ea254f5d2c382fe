"""LagKV (arXiv 2504.04704): keys and values compared with those that came after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..signals import KEYS, POSITIONS, VALUES, LayerView, RoundView
from .base import Policy
from .options import whole


@dataclass(frozen=True)
class LagKV(Policy):
    """Keep, in each chunk, the keys and values that vary most over channels, on the scale of the next chunk.

    What is not protected, candidates and window, is cut into chunks of ``lag`` entries in order of position. Each
    channel of a chunk is scaled by that channel's range in the next chunk. The score is the softmax over the chunk of
    the standard deviation over channels, the mean of keys' and values'. Entries are compared by their rank in their
    chunk, so that all chunks lose the same share, the older ones first what is left over.

    A chunk without a whole chunk behind it has no scale yet and stays, as in the paper. If there is nothing else to
    evict, its oldest entries go: with fewer than 2 ``lag`` entries beside the protected ones this is recency.

    The authors' code cuts each chunk once and lets the cache grow. Here every round cuts what is left into new chunks,
    as kvpress' DecodingPress would.

    Args:
        lag: entries of a chunk, at least 2.
    """

    lag: int = 128

    name: ClassVar[str] = "lagkv"
    rule: ClassVar[str] = "keep keys and values that vary most on the scale of the next chunk"
    paper: ClassVar[str] = "LagKV (arXiv 2504.04704)"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS, KEYS, VALUES})
    published_protection: ClassVar[str] = "sinks:16"

    def __post_init__(self) -> None:
        whole(self, "lag", 2)

    def schedule(self, budget: int) -> dict[str, Any]:
        return {"buffer": self.lag, "window": self.lag}  # whenever another chunk is there; the last one stays

    def score(self, view: RoundView) -> Tensor:
        return view.by_layer(self._layer)

    def _layer(self, layer: LayerView) -> Tensor:
        assert layer.values is not None  # declared in `signals`
        assert layer.eligible is not None
        rows, heads, slots = layer.order.shape
        scored = slots // self.lag - 1  # chunks of the fullest row that have another behind them, or more
        ranks = torch.ones((rows, heads, slots), dtype=torch.float32, device=layer.keys.device)
        if scored > 0:
            free = layer.eligible | layer.window  # [R, 1, N]
            flags = layer.ascending(free.expand(rows, heads, slots))
            places = (~flags).to(torch.uint8).argsort(dim=-1, stable=True)[..., : (scored + 1) * self.lag]
            index = layer.order.gather(-1, places)[..., None]
            parts = [self._chunks(states, index) for states in (layer.keys, layer.values)]
            order = (parts[0] + parts[1]).argsort(dim=-1, stable=True)  # [R, H, chunks, lag]; the mean orders alike
            found = order.argsort(dim=-1).float() / self.lag
            # Behind the last whole chunk of a row lie others' columns: its chunks up to the last but one count.
            whole_chunks = free.sum(dim=-1, keepdim=True) // self.lag - 1  # [R, 1, 1]
            there = torch.arange(scored, device=found.device) < whole_chunks
            found = found.where(there[..., None], 1.0)
            ranks.scatter_(-1, places[..., : scored * self.lag], found.flatten(2))
        return layer.candidates(ranks)

    def _chunks(self, states: Tensor, index: Tensor) -> Tensor:
        """Scores of all chunks but the last, float32 [R, H, chunks, lag], from keys or values [R, H, N, D]."""
        states = states.gather(2, index.expand(*index.shape[:-1], states.shape[-1])).float()
        states = states.unflatten(2, (-1, self.lag))  # [R, H, chunks, lag, D]
        # aminmax and std in one go take many times as long as their parts.
        low, high = states[:, :, 1:].amin(dim=3, keepdim=True), states[:, :, 1:].amax(dim=3, keepdim=True)
        # A channel that never moves has no scale and tells nothing (the reference codes divide by zero).
        scaled = (states[:, :, :-1] - low).mul_((1 / (high - low)).where(high > low, 0.0))
        scaled -= scaled.mean(dim=-1, keepdim=True)
        return (scaled.square().sum(dim=-1) / (scaled.shape[-1] - 1)).sqrt().softmax(dim=-1)
