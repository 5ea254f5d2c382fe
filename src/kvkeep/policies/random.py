"""Random Attention: keep the prompt, the newest tokens, and a fair draw of the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from ..budget import Budget
from ..draws import rank_keys, round_words
from ..signals import RoundView
from .base import Policy, PolicyScope

Draw = Literal["head", "layer", "model"]


@dataclass(frozen=True)
class RandomAttention(Policy):
    """Each round, each KV head of each layer evicts r candidates, drawn fresh and uniformly.

    Evicting a uniform r-subset is the same distribution as the paper's rule: score every entry with
    Uniform(0, 1), set the prompt and the newest to infinity, keep the top K (arXiv 2609.03430, §2).

    Args:
        draw: who shares a draw. "head": nobody, the paper's rule. "layer": the heads of a layer.
            "model": all heads of all layers.
        groups: with draw="head", the heads of a layer form this many groups of neighbours, and the
            heads of a group share a draw. None: every head is its own group.
        unit: this many consecutive slots live and die together; must divide buffer and budget.
    """

    draw: Draw = "head"
    groups: int | None = None
    unit: int = 1

    name: ClassVar[str] = "random"
    rule: ClassVar[str] = "evict a fresh uniform draw of the trace, per KV head"
    paper: ClassVar[str] = "Random Attention (arXiv 2609.03430)"
    published_protection: ClassVar[str] = "prompt"
    content_free: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.draw not in get_args(Draw):
            raise ValueError(f"draw must be one of {', '.join(get_args(Draw))}, got {self.draw!r}")
        if self.groups is not None and (type(self.groups) is not int or self.groups < 1):
            raise ValueError(f"groups must be a whole number of at least 1, got {self.groups!r}")
        if self.groups is not None and self.draw != "head":
            raise ValueError(f"groups={self.groups} goes with draw='head', got draw={self.draw!r}")
        if isinstance(self.unit, bool) or not isinstance(self.unit, int) or self.unit < 1:
            raise ValueError(f"unit must be a whole number of at least 1, got {self.unit!r}")

    @property
    def scope(self) -> PolicyScope:
        return self.draw

    @property
    def slots_per_unit(self) -> int:
        return self.unit

    def check(self, heads: int, budget: Budget) -> None:
        if self.groups is not None and heads % self.groups:
            raise ValueError(f"groups={self.groups} does not divide the model's {heads} KV heads")
        for label, value in (("buffer", budget.every), ("budget", budget.total), ("window", budget.window)):
            if value % self.unit:
                raise ValueError(f"unit={self.unit} does not divide the {label} of {value}: use a divisor of all three")
        if self.unit > 1 and budget.growth is not None:
            raise ValueError(f"unit={self.unit} needs a constant budget: use growth=None or unit=1")

    def schedule(self, budget: int) -> dict[str, Any]:
        return {"buffer": 64, "window": 64}

    def draw_keys(self, view: RoundView) -> Tensor:
        layers, heads = view.layers, view.heads
        if self.draw == "model":
            layers = torch.zeros_like(layers[:1])
        if self.draw != "head":
            heads = torch.zeros_like(heads[:1])
        elif self.groups is not None:
            heads = heads * self.groups // view.model_heads
        ranks = torch.arange(view.candidates // self.unit, dtype=torch.int32, device=view.streams.device)
        return rank_keys(round_words(view.seed, view.streams, layers, heads, view.rounds), ranks)
