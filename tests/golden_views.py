"""Layers as the golden vectors' closed forms give them: all slots filled, in order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvkeep.signals import LayerView

HERE = Path(__file__).parent / "golden"


def golden(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
    return found


def gen(shape: Sequence[int], a: float, c: float) -> np.ndarray:
    """sin(a n + c), row by row."""
    return np.sin(a * np.arange(np.prod(shape)) + c).reshape(shape).astype(np.float32)


def layer_of(keys: np.ndarray, values: np.ndarray, queries: np.ndarray, window: int) -> LayerView:
    """One row: keys and values [H, S, D], queries [H_q, w, D] of the tokens that end at the window or come after it."""
    heads, slots, _ = keys.shape
    order = torch.arange(slots).expand(1, heads, slots)
    first = slots - window
    return LayerView(
        keys=torch.from_numpy(keys)[None],
        positions=order.int(),
        filled=torch.ones(1, 1, slots, dtype=torch.bool),
        window=(order >= first)[:, :1],
        order=order,
        places=order[..., :first],
        queries=torch.from_numpy(queries)[None],
        query_positions=first + torch.arange(queries.shape[1])[None],
        values=torch.from_numpy(values)[None],
        eligible=(order < first)[:, :1],
    )
