"""Pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def cache_bytes_plot(series: Mapping[str, Sequence[tuple[int, int]]], path: str | Path, title: str) -> None:
    """Allocated cache bytes against tokens, one line a policy.

    Args:
        series: for each policy, pairs (tokens seen, allocated bytes).
        path: where the PNG goes.
        title: says model and budget.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), dpi=150)
    for name, points in series.items():
        axes.step([t for t, _ in points], [b / 2**20 for _, b in points], where="post", label=name, linewidth=2)
    axes.set(xlabel="tokens (prompt and trace)", ylabel="allocated cache (MiB)", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
