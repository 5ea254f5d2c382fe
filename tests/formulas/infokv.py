"""InfoKV: alpha times window attention plus (1 - alpha) times the softmax of (D + tau) H."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from formulas.attention import neighbours, weights
from kvkeep.testing import Entries


def infokv(
    row: Sequence[Sequence[Entries]],
    alpha: float = 0.9,
    tau: float = 1.0,
    region: str = "candidates",
    kernel: int = 9,
    pool: str = "attention",
    heads: str = "head",
) -> list[list[dict[int, float]]]:
    found = []
    for layer in row:
        scores = [_scores(e, alpha, tau, region, kernel, pool) for e in layer]
        if heads == "layer":
            mean = {p: float(np.mean([s[p] for s in scores])) for p in layer[0].candidates}
            scores = [mean] * len(layer)
        found.append(scores)
    return found


def _scores(e: Entries, alpha: float, tau: float, region: str, kernel: int, pool: str) -> dict[int, float]:
    G, w, _ = e.queries.shape
    votes = dict.fromkeys(e.cached, 0.0)
    for g in range(G):
        for j in range(w):
            for p, weight in weights(e, g, j, e.cached).items():
                votes[p] += weight / (G * w)
    attention = [0.0 if p in e.window else votes[p] for p in e.cached]
    if pool == "attention":
        attention = neighbours(attention, kernel, "avg")
    shared = e.cached if region == "cached" else e.candidates
    raw = {p: math.exp((e.evolution[p] + tau) * e.entropy[p]) for p in shared}
    total = sum(raw.values())
    score = [alpha * a + (1 - alpha) * raw.get(p, 0.0) / total for p, a in zip(e.cached, attention, strict=True)]
    if pool == "score":
        score = neighbours(score, kernel, "avg")
    return {p: s for p, s in zip(e.cached, score, strict=True) if p in e.candidates}


def masses(row: Sequence[Sequence[Entries]], tau: float = 1.0) -> list[float]:
    """Each layer's sum of E over candidates, on average over heads."""
    return [
        float(np.mean([sum((e.evolution[p] + tau) * e.entropy[p] for p in e.candidates) for e in layer]))
        for layer in row
    ]
