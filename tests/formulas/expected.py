"""Expected Attention in float64 and plain loops: one rotation matrix for each of the coming positions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvkeep.testing import Entries

Past = Sequence[Sequence[np.ndarray]]  # [layer][query head]: all queries before RoPE from position 0, [T, D]


def rotation(position: int, inv_freq: np.ndarray, width: int, scaling: float) -> np.ndarray:
    """[D, D]."""
    pairs = len(inv_freq)
    matrix = np.eye(width)
    for f in range(pairs):
        cos, sin = scaling * math.cos(position * inv_freq[f]), scaling * math.sin(position * inv_freq[f])
        matrix[f, f], matrix[f, f + pairs], matrix[f + pairs, f], matrix[f + pairs, f + pairs] = cos, -sin, sin, cos
    return matrix


def expected(
    row: Sequence[Sequence[Entries]], past: Past, inv_freq: np.ndarray, scaling: float = 1.0, covariance: bool = True,
    value_norm: bool = True, future: int = 512, sinks: int = 4, epsilon: float = 0.0,
) -> list[list[dict[int, float]]]:  # fmt: skip
    width = next(iter(row[0][0].keys.values())).shape[0]
    start = row[0][0].query_positions[-1] + 1
    mean_rotation = sum(rotation(start + j, inv_freq, width, scaling) for j in range(future)) / future
    scores: list[list[dict[int, float]]] = []
    for heads, queries_of in zip(row, past, strict=True):
        scores.append([])
        for h, e in enumerate(heads):
            group = len(e.queries)
            seen = [p for p in e.cached if p >= sinks]
            total = dict.fromkeys(seen, 0.0)
            for g in range(h * group, (h + 1) * group):
                queries = queries_of[g][sinks:]
                mean = sum(queries) / len(queries) if len(queries) else np.zeros(width)
                spread = sum((np.outer(q - mean, q - mean) for q in queries), np.zeros((width, width)))
                spread = spread / max(len(queries), 1)
                mean, spread = mean_rotation @ mean, mean_rotation @ spread @ mean_rotation.T
                logits = {}
                for p in seen:
                    logits[p] = e.scaling * float(e.keys[p] @ mean)
                    if covariance:
                        logits[p] += e.scaling**2 / 2 * float(e.keys[p] @ spread @ e.keys[p])
                top = max(logits.values(), default=0.0)
                mass = sum(math.exp(x - top) for x in logits.values())
                for p in seen:
                    total[p] += math.exp(logits[p] - top) / mass / group
            found = {p: total[p] + epsilon for p in seen}
            if value_norm:
                found = {p: x * float(np.sqrt((e.values[p] ** 2).sum())) for p, x in found.items()}
            above = 2 * max(found.values(), default=1.0)
            scores[-1].append({p: found.get(p, above) for p in e.candidates})
    return scores
