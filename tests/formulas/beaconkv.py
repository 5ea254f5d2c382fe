"""BeaconKV in float64 and plain loops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvkeep.testing import Entries

Beacons = Sequence[Sequence[Sequence[np.ndarray]]]  # [layer][query head][m]: queries before RoPE


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))


def sampled(points: Sequence[np.ndarray], count: int) -> list[int]:
    """Farthest point sampling: which, in the order of choice."""
    n = len(points)
    like = [[cosine(a, b) for b in points] for a in points]
    chosen = [min(range(n), key=lambda i: (sum(like[i][j] for j in range(n) if j != i), i))]
    while len(chosen) < count:
        rest = [i for i in range(n) if i not in chosen]
        chosen.append(min(rest, key=lambda i: (max(like[i][j] for j in chosen), i)))
    return chosen


def beacons_of(past: Sequence[np.ndarray], prompt: int, recent: int, count: int, block: int = 1024) -> list[np.ndarray]:
    """What is left of queries from position 0 on: the prompt block by block, then each full ``recent`` of the trace."""
    kept: list[np.ndarray] = []
    blocks = [past[i : min(i + block, prompt)] for i in range(0, prompt, block)]
    blocks += [past[i : i + recent] for i in range(prompt, len(past) - recent + 1, recent)]
    for part in blocks:
        points = [*kept, *part]
        kept = [points[i] for i in sampled(points, count)] if len(points) >= count else points
    return kept


def rotated(x: np.ndarray, position: int, inv_freq: np.ndarray, scaling: float = 1.0) -> np.ndarray:
    pairs, out = len(inv_freq), x.copy()
    for f in range(pairs):
        turned = scaling * complex(x[f], x[f + pairs]) * np.exp(1j * position * inv_freq[f])
        out[f], out[f + pairs] = turned.real, turned.imag
    return out


def beaconkv(
    row: Sequence[Sequence[Entries]], beacons: Beacons | None, inv_freq: np.ndarray, scaling: float = 1.0,
    recent: int = 16, reduce: str = "max",
) -> list[list[dict[int, float]]]:  # fmt: skip
    scores: list[list[dict[int, float]]] = []
    for i, heads in enumerate(row):
        scores.append([])
        for h, e in enumerate(heads):
            group, now = len(e.queries), e.query_positions[-1]
            votes: dict[int, list[float]] = {p: [] for p in e.candidates}
            for g in range(group):
                voters = [(e.queries[g][j], t) for j, t in enumerate(e.query_positions) if t >= 0][-recent:]
                for b in beacons[i][h * group + g] if beacons is not None else []:
                    voters.append((rotated(b, now, inv_freq, scaling), now))
                for q, t in voters:
                    seen = {p: math.exp(e.scaling * float(q @ e.keys[p])) for p in e.cached if p <= t}
                    for p in e.candidates:
                        votes[p].append(seen.get(p, 0.0) / sum(seen.values()) if seen else 0.0)
            reduced = {p: max(v) if reduce == "max" else sum(v) / len(v) for p, v in votes.items()}
            scores[-1].append(reduced)
    return scores
