"""TriAttention in float64 and plain loops: keys turned back to before RoPE, every distance on its own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kvkeep.testing import Entries

Statistics = Sequence[Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]]]  # [layer][query head]: mean, length, passing


def raw(
    key: np.ndarray, position: int, start: int, statistics: tuple[np.ndarray, ...], inv_freq: np.ndarray,
    scaling: float, offsets: Sequence[int], aggregate: str,
) -> float:  # fmt: skip
    """One query head's score of one key after RoPE."""
    mean, length, passing = statistics
    pairs = len(inv_freq)
    scores = []
    for offset in offsets:
        total = 0.0
        for f in range(pairs):
            turned = complex(key[f], key[f + pairs])
            k = turned * np.exp(-1j * inv_freq[f] * position) / scaling
            phase = np.angle(mean[f] * np.conj(k))
            distance = start - position + offset
            total += scaling**2 * abs(mean[f]) * abs(k) * math.cos(inv_freq[f] * distance + phase)
            total += scaling**2 * (length[f] - abs(mean[f])) * abs(k)
        total += sum(float(passing[j]) * float(key[2 * pairs + j]) for j in range(len(passing)))
        scores.append(total)
    return max(scores) if aggregate == "max" else sum(scores) / len(scores)


def triattention(
    row: Sequence[Sequence[Entries]], statistics: Statistics, inv_freq: np.ndarray, scaling: float = 1.0,
    mode: str = "per_head", aggregate: str = "mean", offset_max: int = 65536,
) -> list[list[dict[int, float]]]:  # fmt: skip
    offsets = [2**i for i in range(40) if 2**i <= offset_max]
    scores: list[list[dict[int, float]]] = []
    for layer, heads in zip(statistics, row, strict=True):
        scores.append([])
        for h, e in enumerate(heads):
            group = len(e.queries)
            start = e.query_positions[-1] + 1
            best = dict.fromkeys(e.candidates, -math.inf)
            for g in range(h * group, (h + 1) * group):
                found = {p: raw(e.keys[p], p, start, layer[g], inv_freq, scaling, offsets, aggregate)
                         for p in e.candidates}  # fmt: skip
                middle = sum(found.values()) / max(len(found), 1)
                spread = math.sqrt(sum((x - middle) ** 2 for x in found.values()) / max(len(found), 1))
                for p, x in found.items():
                    best[p] = max(best[p], (x - middle) / max(spread, 1e-6))
            scores[-1].append(best)
    layers, heads_of = range(len(row)), range(len(row[0]))
    if mode == "per_head":
        mean = [{p: sum(scores[i][h][p] for i in layers) / len(layers) for p in scores[0][h]} for h in heads_of]
        return [mean for _ in layers]
    if mode == "global":
        top = {p: max(scores[i][h][p] for i in layers for h in heads_of) for p in scores[0][0]}
        return [[top for _ in heads_of] for _ in layers]
    return scores
