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
    seen: str = "cached",
    reduce: str = "mean",
) -> list[list[dict[int, float]]]:
    found = []
    for layer in row:
        scores = [_scores(e, alpha, tau, region, kernel, pool, seen, reduce) for e in layer]
        if heads == "layer":
            mean = {p: float(np.mean([s[p] for s in scores])) for p in layer[0].candidates}
            scores = [mean] * len(layer)
        found.append(scores)
    return found


def _scores(
    e: Entries, alpha: float, tau: float, region: str, kernel: int, pool: str, seen: str, reduce: str
) -> dict[int, float]:
    G, w, _ = e.queries.shape
    voters = [j for j in range(w) if e.query_positions[j] >= 0]
    votes = dict.fromkeys(e.cached, 0.0)
    for g in range(G):
        for j in voters:
            for p, weight in weights(e, g, j, e.candidates if seen == "candidates" else e.cached).items():
                votes[p] += weight / (G * (len(voters) if reduce == "mean" else 1))
    # Neighbours are those of everything held, the window giving nothing, or the candidates' alone.
    line = e.candidates if seen == "candidates" else e.cached
    attention = [0.0 if p in e.window else votes[p] for p in line]
    if pool == "attention":
        attention = neighbours(attention, kernel, "avg")
    shared = e.cached if region == "cached" else e.candidates
    raw = {p: math.exp((e.evolution[p] + tau) * e.entropy[p]) for p in shared}
    total = sum(raw.values())
    score = [alpha * a + (1 - alpha) * raw.get(p, 0.0) / total for p, a in zip(line, attention, strict=True)]
    if pool == "score":
        score = neighbours(score, kernel, "avg")
    return {p: s for p, s in zip(line, score, strict=True) if p in e.candidates}


def masses(row: Sequence[Sequence[Entries]], tau: float = 1.0) -> list[float]:
    """Each layer's sum of E over candidates, on average over heads."""
    return [
        float(np.mean([sum((e.evolution[p] + tau) * e.entropy[p] for p in e.candidates) for e in layer]))
        for layer in row
    ]
