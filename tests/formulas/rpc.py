"""RPC: softmax over the candidates alone, sum over queries, mean over heads, average over neighbouring candidates."""

from __future__ import annotations

from collections.abc import Sequence

from formulas.attention import neighbours, weights
from kvkeep.testing import Entries


def rpc(
    row: Sequence[Sequence[Entries]], kernel: int = 7, heads: str = "layer", region: str = "candidates"
) -> list[list[dict[int, float]]]:
    found = []
    for layer in row:
        groups = [layer] * len(layer) if heads == "layer" else [[e] for e in layer]
        found.append([_scores(group, e.candidates, kernel, region) for group, e in zip(groups, layer, strict=True)])
    return found


def _scores(group: Sequence[Entries], candidates: list[int], kernel: int, region: str) -> dict[int, float]:
    votes = dict.fromkeys(candidates, 0.0)
    for e in group:
        G, w, _ = e.queries.shape
        for g in range(G):
            for j in range(w):
                for p, weight in weights(e, g, j, candidates if region == "candidates" else e.cached).items():
                    if p in votes:
                        votes[p] += weight / (G * len(group))
    line = neighbours([votes[p] for p in candidates], kernel, "avg")
    return dict(zip(candidates, line, strict=True))
