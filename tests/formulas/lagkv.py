"""LagKV: rank in a chunk by how keys and values vary over channels, on the scale of the next chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import exp, sqrt

import numpy as np

from kvkeep.testing import Entries


def lagkv(row: Sequence[Sequence[Entries]], lag: int = 128) -> list[list[dict[int, float]]]:
    return [[_head(e, lag) for e in layer] for layer in row]


def _head(e: Entries, lag: int) -> dict[int, float]:
    line = sorted([*e.candidates, *e.window])
    chunks = [line[i : i + lag] for i in range(0, len(line) - lag + 1, lag)]
    scores = dict.fromkeys(line, 1.0)
    for chunk, after in pairwise(chunks):
        keys, values = _spread(chunk, after, e.keys), _spread(chunk, after, e.values)
        order = sorted(chunk, key=lambda p: ((keys[p] + values[p]) / 2, p))
        scores |= {p: place / lag for place, p in enumerate(order)}
    return {p: scores[p] for p in e.candidates}


def _spread(chunk: list[int], after: list[int], states: Mapping[int, np.ndarray]) -> dict[int, float]:
    deviation = {}
    for p in chunk:
        channels = []
        for c, x in enumerate(states[p].tolist()):
            low, high = min(float(states[q][c]) for q in after), max(float(states[q][c]) for q in after)
            channels.append((x - low) / (high - low) if high > low else 0.0)
        mean = sum(channels) / len(channels)
        deviation[p] = sqrt(sum((x - mean) ** 2 for x in channels) / (len(channels) - 1))
    most = max(deviation.values())
    total = sum(exp(d - most) for d in deviation.values())
    return {p: exp(d - most) / total for p, d in deviation.items()}
