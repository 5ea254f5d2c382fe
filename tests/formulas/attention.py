"""Attention in plain loops, shared by the formulas that need it."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from kvkeep.testing import Entries


def weights(entries: Entries, head: int, query: int, among: Collection[int]) -> dict[int, float]:
    """What the ``query``-th query of a query head gives each position: a softmax over ``among``, as far as it sees."""
    now = entries.query_positions[query]
    seen = [p for p in among if p <= now]
    if now < 0 or not seen:
        return {}
    logits = np.array([entries.queries[head, query] @ entries.keys[p] * entries.scaling for p in seen])
    shares = np.exp(logits - logits.max())
    return dict(zip(seen, (shares / shares.sum()).tolist(), strict=True))


def neighbours(line: list[float], kernel: int, pool: str) -> list[float]:
    """Average (of ``kernel`` places, zeros beyond the ends) or maximum around each place."""
    near = [line[max(0, i - kernel // 2) : i + kernel // 2 + 1] for i in range(len(line))]
    return [sum(n) / kernel if pool == "avg" else max(n) for n in near]
