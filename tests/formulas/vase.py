"""VaSE-AttnV and VaSE-DKV given their chance, and kvkeep's draws in plain integers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from formulas.attention import neighbours, weights
from kvkeep.testing import Entries

#: Beyond every logarithm of a weight plus noise in the tests, yet not so far that all gaps look small beside it.
FAR = 40.0


def vase(
    row: Sequence[Sequence[Entries]],
    gumbel: Callable[[int, int, int], float],
    kept: int,
    reserve: float = 0.25,
    sinks: int = 4,
    queries: int = 64,
    kernel: int = 5,
) -> list[list[dict[int, float]]]:
    """``gumbel(layer, head, column)`` is the noise of a candidate, ``kept`` the entries that stay."""
    found: list[list[dict[int, float]]] = []
    for i, layer in enumerate(row):
        found.append([])
        for h, e in enumerate(layer):
            attention, first = smoothed_attention(e, queries, kernel), reserved(e, kept, reserve, sinks)
            scores = {}
            for c, p in enumerate(e.candidates):
                drawn = math.log(attention[p]) + gumbel(i, h, c) if attention[p] > 0 else -FAR
                scores[p] = FAR + first.index(p) / 10 if p in first else drawn
            found[-1].append(scores)
    return found


def reserved(e: Entries, kept: int, reserve: float, sinks: int) -> list[int]:
    """Those of widest range, the widest last."""

    def width(p: int) -> tuple[float, int]:
        return (math.inf if p < sinks else float(e.values[p].max() - e.values[p].min())), p

    count = max(int(reserve * kept), sum(p < sinks for p in e.candidates))
    return sorted(e.candidates, key=width)[max(0, len(e.candidates) - count) :]


def smoothed_attention(e: Entries, queries: int, kernel: int) -> dict[int, float]:
    past = [p for p in e.cached if p not in e.window]
    votes = dict.fromkeys(past, 0.0)
    for g in range(len(e.queries)):
        for j in range(len(e.query_positions))[-queries:]:
            for p, weight in weights(e, g, j, past).items():
                votes[p] += weight / len(e.queries) / min(queries, len(e.query_positions))
    return dict(zip(past, neighbours([votes[p] for p in past], kernel, "avg"), strict=True))


def vase_dkv(
    row: Sequence[Sequence[Entries]], sketch: Callable[[int], np.ndarray], sinks: int = 4
) -> list[list[dict[int, float]]]:
    """``sketch(layer)`` is G [D, rank]."""
    found: list[list[dict[int, float]]] = []
    for i, layer in enumerate(row):
        G = sketch(i)
        found.append([])
        for e in layer:
            length = {p: float(((e.keys[p] @ G) ** 2).sum() * ((e.values[p] @ G) ** 2).sum()) for p in e.cached}
            total = sum(length[p] for p in e.cached if p not in e.window)
            found[-1].append({p: 1.0 if p < sinks else length[p] / total for p in e.candidates})
    return found


# ---- draws ---------------------------------------------------------------------------------------

_WEYL = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    x %= 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def uniform(purpose: int, seed: int, stream: int, layer: int, head: int, number: int, rank: int) -> float:
    word = _mix(stream + seed * _WEYL)
    for value in (number, layer + 1, head + 1, purpose):
        word = _mix(word ^ value * _WEYL % 2**64)
    low, high = word % 2**32, word >> 32
    x = (rank * 0x9E3779B1 + low) % 2**32
    x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
    x = ((x ^ x >> 15) + high) * 0xD35A2D97 % 2**32
    return ((x ^ x >> 15) // 2**9 + 0.5) / 2**23


def gumbel(*numbers: int) -> float:
    return -math.log(-math.log(uniform(*numbers)))


def gaussian(purpose: int, seed: int, stream: int, layer: int, number: int, width: int, rank: int) -> np.ndarray:
    n = width * rank
    first, second = ([uniform(purpose, seed, stream, layer, 0, number, i + k * n) for i in range(n)] for k in (0, 1))
    pairs = zip(first, second, strict=True)
    normal = [math.sqrt(-2 * math.log(a)) * math.cos(2 * math.pi * b) for a, b in pairs]
    return np.array(normal).reshape(width, rank) / math.sqrt(rank)
