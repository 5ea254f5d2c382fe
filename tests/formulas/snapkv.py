"""SnapKV: softmax over all that is cached, over queries, over neighbours (the window lends nothing), over the group."""

from __future__ import annotations

from collections.abc import Sequence

from formulas.attention import neighbours, weights
from kvkeep.testing import Entries


def snapkv(
    row: Sequence[Sequence[Entries]], kernel: int = 5, pool: str = "avg", group: str = "mean", reduce: str = "mean"
) -> list[list[dict[int, float]]]:
    return [[_head(e, kernel, pool, group, reduce) for e in layer] for layer in row]


def _head(e: Entries, kernel: int, pool: str, group: str, reduce: str) -> dict[int, float]:
    G, w, _ = e.queries.shape
    pooled = []
    for g in range(G):
        votes = dict.fromkeys(e.cached, 0.0)
        for j in range(w):
            for p, weight in weights(e, g, j, e.cached).items():
                votes[p] += weight if reduce == "sum" else weight / w
        line = [0.0 if p in e.window else votes[p] for p in e.cached]
        pooled.append(dict(zip(e.cached, neighbours(line, kernel, pool), strict=True)))
    columns = {p: [heads[p] for heads in pooled] for p in e.candidates}
    return {p: sum(c) / G if group == "mean" else max(c) for p, c in columns.items()}
