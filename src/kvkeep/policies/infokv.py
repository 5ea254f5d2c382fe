"""InfoKV (arXiv 2606.26875): attention and the information of each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..budget import Budget
from ..signals import ENTROPY, EVOLUTION, KEYS, POSITIONS, QUERIES, LayerView, RoundView
from .base import Policy, PolicyScope
from .options import choice, fraction, number, odd, truth, whole
from .rpc import RPC
from .snapkv import smoothed


@dataclass(frozen=True)
class InfoKV(Policy):
    """Mix window attention with predictive entropy, weighted by how much a token's hidden state still changes.

    S = alpha A + (1 - alpha) softmax(E), E = (D + tau) H (Eq. 6-8). A is the mean over the newest queries, since
    softmax(E) has mass 1: a sum over queries would drown it (a reading; no code is public). What the paper leaves open
    is an option here.

    Args:
        alpha: weight of attention.
        top: only this many most probable tokens enter the entropy (k of §3.3).
        tau: added to the change of representation, which is 0 in the last layer.
        renormalise: whether the ``top`` probabilities are made to sum to 1. Default no: the paper's sum has no divisor.
        shift: 1: H of a token is the entropy of the prediction *of* it, as the paper's formula says (0 for a request's
            first token); 0: of the prediction made *at* it.
        final_norm: whether D compares with the last layer after the model's final norm. Default: before it.
        region: over what E's softmax runs: ``candidates``, or ``cached`` (everything that is held).
        seen: over what attention's softmax runs: ``cached`` (SnapKV's way), or ``candidates`` (RPC's).
        reduce: queries vote by their ``mean``, or by their ``sum``, which leaves E next to no weight.
        queries: how many of the newest queries vote; 0: the budget's window.
        kernel: positions that share attention, averaged (9 in the paper's prefill; odd, 1: none).
        pool: ``attention`` is pooled before it is mixed, or the whole ``score`` after.
        heads: ``head``: each KV head has its own kept set (SnapKV's way, the paper's prefill); ``layer``: heads of a
            layer share one by the mean of their scores (RPC's way, its decoding).
        adaptive: layers get budgets in proportion to their mass of E (Eq. 9-10); the paper's default is no.
    """

    alpha: float = 0.9
    top: int = 256
    tau: float = 1.0
    renormalise: bool = False
    shift: int = 1
    final_norm: bool = False
    region: Literal["candidates", "cached"] = "candidates"
    seen: Literal["cached", "candidates"] = "cached"
    reduce: Literal["mean", "sum"] = "mean"
    queries: int = 0
    kernel: int = 9
    pool: Literal["attention", "score"] = "attention"
    heads: Literal["head", "layer"] = "head"
    adaptive: bool = False

    name: ClassVar[str] = "infokv"
    rule: ClassVar[str] = "keep what is attended to, and what the model found hard to predict"
    paper: ClassVar[str] = "InfoKV (arXiv 2606.26875)"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS, KEYS, QUERIES, ENTROPY, EVOLUTION})
    published_protection: ClassVar[str] = "prompt"
    prefill_window: ClassVar[int] = 64
    #: Its decoding follows RPC: one set a layer, by attention among candidates.
    published_options: ClassVar[Mapping[str, Any]] = {
        "heads": "layer",
        "kernel": 7,
        "seen": "candidates",
        "queries": 32,
    }

    def __post_init__(self) -> None:
        fraction(self, "alpha")
        whole(self, "top", 1)
        number(self, "tau", 0.0)
        whole(self, "queries", 0)
        odd(self, "kernel")
        for name in ("renormalise", "final_norm", "adaptive"):
            truth(self, name)
        if type(self.shift) is not int or self.shift not in (0, 1):
            raise ValueError(f"shift is 1 (the prediction of a token) or 0 (the prediction at it), got {self.shift!r}")
        choice(self, "region", "candidates", "cached")
        choice(self, "seen", "cached", "candidates")
        choice(self, "reduce", "mean", "sum")
        choice(self, "pool", "attention", "score")
        choice(self, "heads", "head", "layer")

    @property
    def scope(self) -> PolicyScope:
        return self.heads

    @property
    def splits(self) -> bool:
        return self.adaptive

    @property
    def entropy_shift(self) -> int:
        return self.shift

    def schedule(self, budget: int) -> dict[str, Any]:
        """Its decoding follows RPC: every 1,024 tokens, a quarter of what was generated stays."""
        return RPC().schedule(budget)

    def query_window(self, budget: Budget) -> int:
        return self.queries or budget.window or budget.every

    def entropy(self, logits: Tensor) -> Tensor:
        top = logits.log_softmax(-1).topk(min(self.top, logits.shape[-1]), dim=-1).values
        if self.renormalise:
            top = top - top.logsumexp(-1, keepdim=True)
        return -(top.exp() * top).nan_to_num(nan=0.0).sum(-1)  # a token of probability 0 adds nothing

    def score(self, view: RoundView) -> Tensor:
        scores = view.by_layer(self._layer)
        return scores.mean(dim=2, keepdim=True) if self.heads == "layer" else scores

    def _layer(self, layer: LayerView) -> Tensor:
        attention = layer.ascending(self._votes(layer))
        if self.pool == "attention":
            attention = self._pooled(layer, attention)
        information = self._information(layer).masked_fill(~self._where(layer), float("-inf")).softmax(-1)
        information = layer.ascending(information.nan_to_num(nan=0.0))  # nothing to choose from
        score = self.alpha * attention + (1 - self.alpha) * information
        return layer.candidates(self._pooled(layer, score) if self.pool == "score" else score)

    def _votes(self, layer: LayerView) -> Tensor:
        """Window attention, mean over the group, [R, H, N] by slot; the window itself gets none."""
        assert layer.query_positions is not None
        weights = layer.attention(layer.eligible if self.seen == "candidates" else None)
        votes = weights.sum(dim=3).mean(dim=2).masked_fill_(layer.window, 0.0)
        if self.reduce == "mean":  # over the queries there are: a short row has fewer
            votes /= (layer.query_positions >= 0).sum(-1)[:, None, None]
        return votes

    def _pooled(self, layer: LayerView, line: Tensor) -> Tensor:
        """Average of neighbours; where only candidates are seen, of neighbouring candidates."""
        if self.seen == "cached":
            return smoothed(line, self.kernel, "avg")
        near = smoothed(layer.candidates(line) * layer.there(), self.kernel, "avg")
        return torch.zeros_like(line).scatter_(-1, layer.places, near)

    def _where(self, layer: LayerView) -> Tensor:
        assert layer.eligible is not None
        return layer.filled if self.region == "cached" else layer.eligible

    def _information(self, layer: LayerView) -> Tensor:
        """E of each entry, [R, H, N]."""
        assert layer.entropy is not None
        assert layer.evolution is not None
        return (layer.evolution + self.tau) * layer.entropy

    def allot(self, view: RoundView, keys: Tensor) -> Tensor | None:
        if not self.adaptive:
            return None
        assert view.layer is not None
        layers = len(view.layers)
        masses = []
        for i in range(layers):
            layer = view.layer(i)
            mass = (self._information(layer) * self._where(layer)).double().sum(-1).mean(-1)  # [R]
            masses.append(mass.to(view.layers.device))
        mass = torch.stack(masses, dim=1)
        whole = mass.sum(-1, keepdim=True)
        share = torch.where(whole > 0, mass / whole.clamp_min(1e-300), 1.0 / layers)
        return share * layers * torch.tensor(view.kept, dtype=torch.float64, device=share.device).unsqueeze(-1)
