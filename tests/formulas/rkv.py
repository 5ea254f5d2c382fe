"""R-KV: importance is what the loudest query head of the group attends to before the window; redundancy is likeness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from formulas.attention import neighbours
from kvkeep.testing import Entries


def rkv(
    row: Sequence[Sequence[Entries]],
    lam: float = 0.1,
    threshold: float = 0.5,
    kernel: int = 7,
    queries: int = 8,
    variant: str = "official",
    beta: int = 1,
) -> list[list[dict[int, float]]]:
    def head(e: Entries) -> dict[int, float]:
        worth, same = importance(e, kernel, queries), redundancy(e, threshold, variant, beta)
        return {p: lam * worth[p] - (1 - lam) * same[p] for p in e.candidates}

    return [[head(e) for e in layer] for layer in row]


def importance(e: Entries, kernel: int, queries: int) -> dict[int, float]:
    past = [p for p in e.cached if p not in e.window]
    votes, count = dict.fromkeys(past, 0.0), 0
    for j in range(len(e.query_positions))[-queries:]:
        now = e.query_positions[j]
        seen = [p for p in past if p <= now]
        count += now >= 0
        if now >= 0 and seen:
            logits = [max(float(q[j] @ e.keys[p]) for q in e.queries) * e.scaling for p in seen]
            shares = np.exp(np.array(logits) - max(logits))
            for p, share in zip(seen, shares / shares.sum(), strict=True):
                votes[p] += float(share)
    return dict(zip(past, neighbours([votes[p] / count for p in past], kernel, "max"), strict=True))


def redundancy(e: Entries, threshold: float, variant: str, beta: int) -> dict[int, float]:
    n, unit = len(e.cached), [e.keys[p] / np.linalg.norm(e.keys[p]) for p in e.cached]
    cosines = [[0.0 if i == j else float(unit[i] @ unit[j]) for j in range(n)] for i in range(n)]
    for line in cosines:
        alike = [j for j in range(n) if line[j] > threshold]
        exempt = alike[-beta:] if variant == "paper" else [alike[-1] if alike else 0]
        for j in exempt:
            line[j] = 0.0
    mean = np.array([sum(cosines[i][j] for i in range(n)) / n for j in range(n)])
    shares = np.exp(mean - mean.max())
    return dict(zip(e.cached, (shares / shares.sum()).tolist(), strict=True))
