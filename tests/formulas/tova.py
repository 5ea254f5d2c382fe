"""TOVA: what the last query attends to, on average over every query head of the layer."""

from __future__ import annotations

from collections.abc import Sequence

from formulas.attention import weights
from kvkeep.testing import Entries


def tova(row: Sequence[Sequence[Entries]]) -> list[list[dict[int, float]]]:
    found = []
    for layer in row:
        votes = [weights(e, g, len(e.query_positions) - 1, e.cached) for e in layer for g in range(len(e.queries))]
        scores = {p: sum(v.get(p, 0.0) for v in votes) / len(votes) for p in layer[0].candidates}
        found.append([scores] * len(layer))
    return found
