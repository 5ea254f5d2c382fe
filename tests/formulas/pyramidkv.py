"""PyramidKV: the budget of each layer, as the paper's code has it for what can be chosen."""

from __future__ import annotations


def budgets(mean: float, there: int, layers: int, beta: float = 20.0) -> list[float]:
    """Chosen entries of each layer: ``mean`` over layers, ``there`` to choose from (C - w and n - w in the paper)."""
    if layers == 1 or there <= mean:
        return [mean] * layers  # SnapKV
    least = mean / beta
    most = 2 * mean - least
    if most >= there:
        most = there
        least = 2 * mean - most
    return [most - number * (most - least) / (layers - 1) for number in range(layers)]
