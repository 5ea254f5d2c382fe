"""The small budget that most regression tests of the cache run under."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import kvkeep

K, R = 24, 4


def evict(model: Any, policy: Any = "random", **values: Any) -> Any:
    return kvkeep.evict(model, policy, **{"budget": K, "buffer": R, "seed": 7, **values})


def bools(positions: list[int], rows: int = 1) -> Tensor:
    """A mask [rows, 1, 1, T] that is True at ``positions``."""
    mask = torch.zeros(rows, 1, 1, 80, dtype=torch.bool)
    mask[..., positions] = True
    return mask
