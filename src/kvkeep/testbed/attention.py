"""Causal attention for training on a CPU: blocks of queries, nothing above the diagonal, nothing stored but q, k, v.

Queries of one KV head's group lie under one another, so a block is one product for all of them; its temporaries stay
in the processor's cache. Keys may have a *deadline*: queries after it do not see them. That is KV dropout, a
simulation of eviction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK = 128  # queries; times keys, heads and bytes this fits a second-level cache


@dataclass(frozen=True)
class Dropout:
    """Plain attention dropout, its masks cut from one pool of random bits at places drawn afresh.

    Args:
        rate: share of attention weights set to zero; the rest is scaled up.
        pool: bool [N], True with probability 1 - rate.
        generator: draws where a mask begins.
    """

    rate: float
    pool: Tensor
    generator: torch.Generator

    def place(self, size: int) -> int:
        """Where a mask of ``size`` entries begins in the pool."""
        return int(torch.randint(0, self.pool.numel() - size, (1,), generator=self.generator))

    @staticmethod
    def make(rate: float, generator: torch.Generator, size: int = 2**24) -> Dropout:
        """A pool of ``size`` entries drawn from ``generator``."""
        return Dropout(rate, torch.rand(size, generator=generator) >= rate, generator)


class _Attention(torch.autograd.Function):
    """q [B, H, G, T, D] (scaled), k and v [B, H, T, D], deadline int32 [B, H, T] or None -> [B, H, G, T, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, deadline: Tensor | None, dropout: Dropout | None) -> Tensor:
        out = torch.empty_like(q)
        places: list[int] = []
        for row in range(q.shape[0]):
            for start in range(0, q.shape[3], BLOCK):
                p, drop = _block(q, k, deadline, dropout, row, start, places, None)
                stop = min(start + BLOCK, q.shape[3])
                block = (p if drop is None else p * drop) @ v[row, :, :stop]
                out[row, :, :, start:stop] = block.view(out[row, :, :, start:stop].shape)
        ctx.save_for_backward(q, k, v, out)
        ctx.deadline, ctx.dropout, ctx.places = deadline, dropout, places
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out = ctx.saved_tensors
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        places = iter(ctx.places)
        for row in range(q.shape[0]):
            for start in range(0, q.shape[3], BLOCK):
                stop = min(start + BLOCK, q.shape[3])
                p, drop = _block(q, k, ctx.deadline, ctx.dropout, row, start, None, places)
                g = grad[row, :, :, start:stop].reshape(q.shape[1], -1, q.shape[-1])
                o = out[row, :, :, start:stop].reshape(g.shape)
                queries = q[row, :, :, start:stop].reshape(g.shape)
                dv[row, :, :stop] += (p if drop is None else p * drop).transpose(1, 2) @ g
                ds = g @ v[row, :, :stop].transpose(1, 2)
                if drop is not None:
                    ds.mul_(drop)
                ds.sub_((g * o).sum(-1, keepdim=True)).mul_(p)
                dq[row, :, :, start:stop] = (ds @ k[row, :, :stop]).view(dq[row, :, :, start:stop].shape)
                dk[row, :, :stop] += ds.transpose(1, 2) @ queries
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None


def _block(
    q: Tensor,
    k: Tensor,
    deadline: Tensor | None,
    dropout: Dropout | None,
    row: int,
    start: int,
    note: list[int] | None,
    noted: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention weights [H, G * t, keys] of a block of queries, and its dropout factors."""
    stop = min(start + BLOCK, q.shape[3])
    heads, groups = q.shape[1:3]
    scores = q[row, :, :, start:stop].reshape(heads, groups * (stop - start), -1) @ k[row, :, :stop].transpose(1, 2)
    shaped = scores.view(heads, groups, stop - start, stop)
    after = torch.ones(stop - start, stop - start, dtype=torch.bool).triu(1)
    shaped[..., start:].masked_fill_(after, float("-inf"))
    if deadline is not None:
        at = torch.arange(start, stop, dtype=torch.int32)[:, None]
        shaped.masked_fill_((at > deadline[row, :, None, :stop])[:, None], float("-inf"))
    p = scores.softmax(-1)
    if dropout is None:
        return p, None
    if note is not None:
        place = dropout.place(p.numel())
        note.append(place)
    else:
        place = next(noted)
    drop = dropout.pool[place : place + p.numel()].view(p.shape)
    return p, drop.to(p.dtype).mul_(1 / (1 - dropout.rate))


def attend(q: Tensor, k: Tensor, v: Tensor, deadline: Tensor | None = None, dropout: Dropout | None = None) -> Tensor:
    """Causal attention of grouped queries.

    Args:
        q: [B, H_kv, G, T, D], already scaled.
        k: [B, H_kv, T, D].
        v: [B, H_kv, T, D].
        deadline: int32 [B, H_kv, T]: the last query index that sees each key (at least the key's own); None: all do.
        dropout: of attention weights.

    Returns:
        [B, H_kv, G, T, D], in the dtype of q.
    """
    found: Tensor = _Attention.apply(q, k, v, deadline, dropout)
    return found
