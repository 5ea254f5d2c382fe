"""The small budget that most regression tests of the cache run under."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kvkeep
from models import step

K, R = 24, 4
#: Sizes of chunks, over and over: token by token, uneven, a whole round, and what does not divide it.
PIECES = ([1], [2, 4, 1, 3], [4], [3, 1])


def evict(model: Any, policy: Any = "random", **values: Any) -> Any:
    return kvkeep.evict(model, policy, **{"budget": K, "buffer": R, "seed": 7, **values})


def bools(positions: list[int], rows: int = 1) -> Tensor:
    """A mask [rows, 1, 1, T] that is True at ``positions``."""
    mask = torch.zeros(rows, 1, 1, 80, dtype=torch.bool)
    mask[..., positions] = True
    return mask


def in_pieces(model: Any, cache: Any, ids: Tensor, prompt: int, pieces: list[int]) -> None:
    """Feed ids [1, T], of which ``prompt`` are prompt, in chunks of these sizes, shorter where a round is due."""
    at, turn, length = 0, 0, ids.shape[1]
    while at < length:
        space = prompt - at if at < prompt else cache.trace_space() or 1
        size = min(pieces[turn % len(pieces)], space, length - at)
        with cache.as_trace() if at >= prompt else cache.as_prompt():
            step(model, cache, ids[:, at : at + size])
        at, turn = at + size, turn + 1
