"""Expected Attention (arXiv 2510.00636), used at every round of decoding."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import ClassVar

import torch
from torch import Tensor

from ..budget import Budget
from ..rotary import Rotary
from ..signals import DIGEST, KEYS, POSITIONS, QUERIES, ROTARY, VALUES, LayerView, RoundView
from .base import Policy
from .options import number, truth, whole

_SLOTS = 512  # keys that are squared at once, so that temporaries stay small


@dataclass(frozen=True)
class ExpectedAttention(Policy):
    """Keep what the coming queries should attend to, if queries before RoPE are normally distributed.

    Mean and covariance (population) of all queries so far, turned by the mean rotation of the next ``future``
    positions, give each key the logarithm of its expected exponential score; softmax over what is cached without
    sinks, mean over the group of query heads, times the length of the value.

    kvpress, the authors' code, takes future positions while decoding from the length of a buffer of at most 256 hidden
    states and drops the buffer's first entries for sinks; here positions are the true ones, sinks are the first of the
    text and all queries count.

    Args:
        covariance: take the covariance into account, not the mean alone.
        value_norm: multiply with the value's length.
        future: positions ahead over which the rotation is averaged.
        sinks: first positions whose queries do not count, and which outrank all others where they are candidates.
        epsilon: added to the expected attention before values are taken into account.
    """

    covariance: bool = True
    value_norm: bool = True
    future: int = 512
    sinks: int = 4
    epsilon: float = 0.0

    name: ClassVar[str] = "expected"
    rule: ClassVar[str] = "keep what normally distributed queries will attend to, times the value's length"
    paper: ClassVar[str] = "Expected Attention (arXiv 2510.00636)"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS, KEYS, VALUES, QUERIES, ROTARY, DIGEST})
    published_protection: ClassVar[str] = "sinks:4"
    digest_blocks: ClassVar[tuple[int, int | None]] = (128, 64)

    def __post_init__(self) -> None:
        whole(self, "future", 1)
        whole(self, "sinks", 0)
        truth(self, "covariance")
        truth(self, "value_norm")
        number(self, "epsilon", 0)

    def query_window(self, budget: Budget) -> int:
        return 64  # a trace block: what the digest lacks

    def digest(self, state: Tensor | None, queries: Tensor, positions: Tensor) -> Tensor:
        """[R, H_q, D + 2, D]: number of queries, their mean, sums of products of what differs from it.

        Sums of plain products would lose the covariance of heads whose mean is hundreds of deviations away.
        """
        counts = (positions >= self.sinks)[:, None, :, None].float()  # [R, 1, n, 1]
        count = counts.sum(2, keepdim=True).expand(-1, queries.shape[1], -1, queries.shape[-1])  # [R, H_q, 1, D]
        mean = (queries * counts).sum(2, keepdim=True) / count.clamp_min(1)
        apart = (queries - mean) * counts
        products = apart.transpose(-1, -2) @ apart
        if state is None:
            return torch.cat([count, mean, products], dim=2)
        before, old, sums = state.split([1, 1, state.shape[-1]], dim=2)
        total = before + count
        step = (mean - old) * count / total.clamp_min(1)
        shift = (mean - old).transpose(-1, -2) @ (step * before)
        return torch.cat([total, old + step, sums + products + shift], dim=2)

    def score(self, view: RoundView) -> Tensor:
        means: list[Tensor] = []  # the same for all layers

        def layer_by_layer(layer: LayerView) -> Tensor:
            assert layer.rotary is not None  # declared in `signals`
            if not means:
                means.append(_mean_turn(layer.rotary, torch.tensor(view.seen, device=layer.keys.device), self.future))
            return self._layer(layer, means[0].to(layer.keys.device))

        return view.by_layer(layer_by_layer)

    def _state(self, layer: LayerView) -> Tensor:
        """The digest with the pending queries in it."""
        state = layer.digest
        if layer.pending:
            assert layer.query_positions is not None
            newest = layer.prerope()[:, :, -layer.pending :]
            state = self.digest(state, newest, layer.query_positions[:, -layer.pending :])
        if state is None:
            raise ValueError("expected has seen no queries: the engine gave no digest")
        return state

    def _layer(self, layer: LayerView, turn: Tensor) -> Tensor:
        assert layer.rotary is not None  # declared in `signals`
        assert layer.values is not None
        keys = layer.keys.float()
        rows, heads, _, width = keys.shape
        scaling = width**-0.5 if layer.scaling is None else layer.scaling
        count, mean, products = self._state(layer).split([1, 1, width], dim=2)
        mean = _turned(mean, turn, layer.rotary).view(rows, heads, -1, width)
        logits = scaling * (mean @ keys.transpose(-1, -2))  # [R, H, G, N]
        if self.covariance:
            spread = products / count.clamp_min(1)
            spread = _turned(_turned(spread, turn, layer.rotary).transpose(-1, -2), turn, layer.rotary)
            spread = spread.view(rows, heads, -1, width, width)
            # E exp(s q.k) = exp(s m.k + s^2 k.S.k / 2) of a normal q
            logits += scaling**2 / 2 * torch.cat([_squares(k, spread) for k in keys.split(_SLOTS, dim=2)], dim=-1)
        sink = layer.filled & (layer.positions < self.sinks)  # [R, H, N]
        scores = layer.weights(logits, layer.filled & ~sink).mean(dim=2)
        if self.epsilon:
            scores = scores + self.epsilon
        if self.value_norm:
            scores = scores * layer.values.float().norm(dim=-1)
        scores = scores.masked_fill(~layer.filled, 0.0)
        top = scores.masked_fill(sink, 0.0).amax(dim=-1, keepdim=True)
        return layer.candidates(layer.ascending(torch.where(sink, 2 * top, scores)))


def _squares(keys: Tensor, spread: Tensor) -> Tensor:
    """k.S.k, [R, H, G, n] of keys [R, H, n, D] and S [R, H, G, D, D]."""
    keys = keys[:, :, None]
    return ((keys @ spread) * keys).sum(-1)


def _mean_turn(rotary: Rotary, start: Tensor, future: int) -> Tensor:
    """complex128 [R, F]: mean of exp(i w t) over t = start, ..., start + future - 1, times the model's scaling.

    The geometric series in the form that has no special case at w = 0.
    """
    w = rotary.inv_freq.to(start.device)
    size = torch.sinc(w * future / (2 * pi)) / torch.sinc(w / (2 * pi)) * rotary.scaling
    middle = rotary.angles(start) + w * (future - 1) / 2
    return size * torch.polar(torch.ones_like(middle), middle)


def _turned(x: Tensor, turn: Tensor, rotary: Rotary) -> Tensor:
    """Each vector along the last axis of ``x`` [R, H_q, n, D] by ``turn`` [R, F]."""
    turned = rotary.complex(x) * turn[:, None, None].to(torch.complex64)
    return torch.cat([turned.real, turned.imag, x[..., 2 * rotary.pairs :]], dim=-1)
