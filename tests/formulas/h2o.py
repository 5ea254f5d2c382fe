"""H2O: attention that an entry has received since it was cached."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from kvkeep.testing import Entries


def received(
    queries: Mapping[int, np.ndarray],
    keys: Mapping[int, np.ndarray],
    visible: Callable[[int], Collection[int]],
    scaling: float,
) -> dict[int, float]:
    """The sum itself, over every query so far and the group's query heads.

    Args:
        queries: [G, D] by position.
        keys: [D] by position.
        visible: what was still cached when this position's query was asked, its own entry included.
    """
    total = dict.fromkeys(keys, 0.0)
    for t, group in queries.items():
        seen = sorted(visible(t))
        for query in group:
            logits = np.array([query @ keys[p] * scaling for p in seen])
            shares = np.exp(logits - logits.max())
            for p, share in zip(seen, shares / shares.sum(), strict=True):
                total[p] += float(share)
    return total


def h2o(row: Sequence[Sequence[Entries]], count: str = "cumulative") -> list[list[dict[int, float]]]:
    found = []
    for layer in row:
        heads = []
        for e in layer:
            seen = e.query_positions[-1] + 1
            heads.append({p: e.received[p] / (1 if count == "cumulative" else seen - p) for p in e.candidates})
        found.append(heads)
    return found
