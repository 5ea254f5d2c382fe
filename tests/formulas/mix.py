"""A mix, brute force: the second policy picks its best one by one, then the first picks among what is left."""

from __future__ import annotations

from collections.abc import Mapping


def mixed(first: Mapping[int, float], second: Mapping[int, float], share: float, keep: int) -> set[int]:
    """Positions that stay, ``keep`` of them; of equals the newer is better."""
    of_second = int((1 - share) * keep + 0.5)
    stay: list[int] = []
    while len(stay) < keep:
        scores = second if len(stay) < of_second else first
        stay.append(max((p for p in scores if p not in stay), key=lambda p: (scores[p], p)))
    return set(stay)
