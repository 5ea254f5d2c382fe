"""The two content-free rules a fair die must beat: keep what is newest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..signals import POSITIONS, RoundView
from .base import Policy, PolicyScope


@dataclass(frozen=True)
class Recency(Policy):
    """Evict the oldest unprotected entries: the protected prefix and a sliding window remain."""

    name: ClassVar[str] = "recency"
    rule: ClassVar[str] = "evict the oldest of the trace"
    paper: ClassVar[str] = "sliding window (a control in arXiv 2609.03430)"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS})
    content_free: ClassVar[bool] = True

    @property
    def scope(self) -> PolicyScope:
        return "model"

    def schedule(self, budget: int) -> dict[str, Any]:
        return {"buffer": 1, "window": 1}  # at every token

    def score(self, view: RoundView) -> Tensor:
        assert view.positions is not None  # declared in `signals`
        return view.positions.to(torch.float32)  # exact up to 2^24 tokens


@dataclass(frozen=True)
class StreamingLLM(Recency):
    """Attention sinks and a sliding window, at the tokens' logical positions.

    The paper (arXiv 2309.17453, §3.2) numbers positions inside the cache; keys here are cached after
    RoPE and keep their positions in the text, as in every engine that does not rotate them again.
    """

    name: ClassVar[str] = "streaming"
    rule: ClassVar[str] = "keep the first tokens (sinks) and the newest"
    paper: ClassVar[str] = "StreamingLLM (arXiv 2309.17453)"
    published_protection: ClassVar[str] = "sinks:4"
    default_protection: ClassVar[str] = "sinks:4"
