"""RPC, Reasoning Path Compression (arXiv 2505.13866)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from ..budget import Budget
from ..signals import KEYS, POSITIONS, QUERIES, LayerView, RoundView
from .base import Policy, PolicyScope
from .options import choice, odd, whole
from .snapkv import smoothed

INTERVAL, RATE = 1024, 4.0  # P and c of the paper


@dataclass(frozen=True)
class RPC(Policy):
    """Keep what the newest queries attend to among the candidates alone, on average over heads and neighbours.

    Prompt and window take no part in the softmax, nor do they lend their neighbours anything when scores are pooled.

    In the paper the kept trace grows: after N compressions it holds N P / c + R entries, prompt not counted.
    :meth:`schedule` gives the settings for that, K included; any other budget is the fixed form.

    The code counts the newest query twice and the oldest of the R not at all; each counts once here.

    Args:
        queries: R, newest queries that vote.
        kernel: candidates that share their scores (odd).
        region: what shares the softmax: ``candidates`` (the code), or everything that is ``cached``.
        heads: ``layer``: all heads of a layer share one kept set (the code's default, ``all``); ``group``: one a KV
            head, the mean over its query heads.
    """

    queries: int = 32
    kernel: int = 7
    heads: Literal["layer", "group"] = "layer"
    region: Literal["candidates", "cached"] = "candidates"

    name: ClassVar[str] = "rpc"
    rule: ClassVar[str] = "keep what the newest queries attend to among the candidates, one set a layer"
    paper: ClassVar[str] = "RPC (arXiv 2505.13866)"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS, KEYS, QUERIES})
    published_protection: ClassVar[str] = "prompt"
    prefill_window: ClassVar[int] = 32

    def __post_init__(self) -> None:
        whole(self, "queries", 1)
        odd(self, "kernel")
        choice(self, "heads", "layer", "group")
        choice(self, "region", "candidates", "cached")

    @property
    def scope(self) -> PolicyScope:
        return "layer" if self.heads == "layer" else "head"

    def schedule(self, budget: int) -> dict[str, Any]:
        """The paper's, whatever ``budget``: K is what the first compression leaves, P / c + R."""
        first = int(INTERVAL / RATE) + self.queries
        return {"budget": first, "buffer": INTERVAL, "window": self.queries, "growth": RATE, "scope": "trace"}

    def query_window(self, budget: Budget) -> int:
        return self.queries

    def score(self, view: RoundView) -> Tensor:
        return view.by_layer(self._layer)

    def _layer(self, layer: LayerView) -> Tensor:
        assert layer.eligible is not None  # or all would share the softmax
        among = layer.eligible if self.region == "candidates" else None
        votes = layer.attention(among).sum(dim=3).mean(dim=2)  # [R, H, N]
        votes = layer.chosen(votes) * layer.there()  # nothing behind the candidates of short rows
        if self.heads == "layer":
            votes = votes.mean(dim=1, keepdim=True)
        return smoothed(votes, self.kernel, "avg")
