"""Attention that entries receive from a forward's queries, without a matrix of all queries and entries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_NUMBERS = 1 << 24  # of attention weights at once: 64 MiB


def received(queries: Tensor, keys: Tensor, mask: Tensor | None, scaling: float | None, pads: Sequence[int]) -> Tensor:
    """Attention weights summed over a forward's queries and over the query heads of each KV head.

    Soft caps, and sinks that a model learns beside its keys, are left out, as in
    :meth:`kvkeep.signals.LayerView.attention`.

    Args:
        queries: [B, H_q, q, D] after RoPE.
        keys: [B, H, S, D] that they may see; the last q are their own.
        mask: as the attention function got it: bool (True: seen) or additive [B, 1, q, >= S], int [B, S] of what exists
            (flash), or None (causal).
        scaling: of the scores; None: D^-0.5.
        pads: padding columns of each row, whose queries do not count.

    Returns:
        float32 [B, H, S].
    """
    batch, query_heads, q, width = queries.shape
    heads, slots = keys.shape[1:3]
    scaling = width**-0.5 if scaling is None else scaling
    keys = keys.float().transpose(-1, -2)
    counted = None
    if any(pads):  # bool [B, q]
        counted = torch.arange(q, device=queries.device) >= torch.tensor(pads, device=queries.device)[:, None]
    found = torch.zeros(batch, heads, slots, device=queries.device)
    size = max(1, _NUMBERS // (batch * query_heads * slots))
    for first in range(0, q, size):
        part = queries[:, :, first : first + size].float().mul(scaling)
        n = part.shape[2]
        scores = (part.reshape(batch, heads, -1, width) @ keys).view(batch, heads, -1, n, slots)
        seen = _seen(mask, first, n, q, slots, queries.device)
        if seen is not None:
            scores = scores.masked_fill_(~seen[:, None], float("-inf"))
        weights = scores.softmax(-1)
        if counted is not None:
            weights = weights.masked_fill_(~counted[:, None, None, first : first + size, None], 0.0)
        found += weights.sum(dim=(2, 3))
    return found


def _seen(mask: Tensor | None, first: int, n: int, q: int, slots: int, device: torch.device) -> Tensor | None:
    """bool [B or 1, 1, n, S]: what queries ``first`` to ``first + n`` of q may see; None: everything."""
    if mask is not None and mask.dim() == 4:
        part = mask[:, :, first : first + n, :slots]
        return part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2
    causal = None
    if q > 1:
        at = torch.arange(first, first + n, device=device).unsqueeze(-1) + slots - q
        causal = (torch.arange(slots, device=device) <= at)[None, None]
    if mask is None:
        return causal
    valid = mask[:, None, None, -slots:].bool()
    return valid if causal is None else causal & valid
