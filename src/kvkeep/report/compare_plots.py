"""Figures of a comparison: score against compression, score against measured bytes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Okabe and Ito's colours, which colour-blind readers can tell apart; black is the full cache's.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999", "#F0E442")
MARKERS = "osD^vPX*"


def score_figure(summary: Mapping[str, Any], path: Path) -> None:
    """Score against nominal compression with intervals: a panel a task, a row of panels a model, a line an arm."""

    def draw(axes: Any, arm: str, cells: list[Any], style: dict[str, Any], step: int) -> None:
        shift = 1.02 ** (step - 2)  # so that bars do not hide each other
        x = [cell["compression"] * shift for cell in cells]
        axes.errorbar(x, [c["accuracy"] for c in cells], yerr=_bars(cells), label=arm, capsize=3, **style)

    _figure(summary, path, draw, "compression (asked)", log=True)


def cost_figure(summary: Mapping[str, Any], path: Path) -> None:
    """Score against mean allocated bytes of a row, measured."""

    def draw(axes: Any, arm: str, cells: list[Any], style: dict[str, Any], step: int) -> None:
        x = [cell["mean_bytes"] / 1024 for cell in cells]
        axes.errorbar(x, [c["accuracy"] for c in cells], yerr=_bars(cells), label=arm, capsize=3, **style)

    _figure(summary, path, draw, "mean cache of a row (KiB, measured)", log=False)


def _figure(summary: Mapping[str, Any], path: Path, draw: Any, label: str, log: bool) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models, tasks, arms = (_distinct(summary, key) for key in ("model", "task", "arm"))
    size = (1.8 + 4.2 * len(tasks), 0.6 + 3.2 * len(models))
    figure, panels = plt.subplots(len(models), len(tasks), figsize=size, dpi=150, squeeze=False)
    for i, model in enumerate(models):
        for j, task in enumerate(tasks):
            axes = panels[i][j]
            for step, arm in enumerate(arms):
                cells = [c for c in summary["cells"] if (c["model"], c["task"], c["arm"]) == (model, task, arm)]
                cells.sort(key=lambda c: c["compression"])
                if cells and cells[0]["budget"] is None:
                    _full(axes, arm, cells[0], draw if not log else None)
                elif cells:
                    draw(axes, arm, cells, _style(step), step)
            _dress(axes, f"{model}\n{task}", label, summary, model, task, log)
    handles = {text: handle for row in panels for axes in row
               for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1 - 1.8 / size[0], 1))
    figure.legend(handles.values(), handles.keys(), loc="center right", frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def _full(axes: Any, arm: str, cell: Any, draw: Any) -> None:
    """The full cache: a line across where x is compression, a point where it is bytes."""
    style = {"color": "black", "marker": "s", "linestyle": "--", "markersize": 5}
    if draw is not None:
        draw(axes, arm, [cell], style, 0)
        return
    if cell["low"] is not None and cell["high"] is not None:
        axes.axhspan(cell["low"], cell["high"], color="black", alpha=0.08, linewidth=0)
    axes.axhline(cell["accuracy"], color="black", linestyle="--", linewidth=1.5, label=arm)


def _style(step: int) -> dict[str, Any]:
    return {"color": COLOURS[step % len(COLOURS)], "marker": MARKERS[step % len(MARKERS)], "markersize": 5,
            "linewidth": 1.6, "linestyle": "-" if step < len(COLOURS) else ":"}  # fmt: skip


def _dress(axes: Any, title: str, label: str, summary: Mapping[str, Any], model: str, task: str, log: bool) -> None:
    here = [c for c in summary["cells"] if (c["model"], c["task"]) == (model, task)]
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(label)
    axes.set_ylabel(here[0]["metric"])
    if here[0]["metric"] == "accuracy":
        axes.set_ylim(-0.03, 1.03)
    if log:
        axes.set_xscale("log")
        ticks = sorted({c["compression"] for c in here if c["budget"] is not None}) or [1]
        axes.set_xticks(ticks, [f"{tick:g}x" for tick in ticks])
        axes.minorticks_off()
    axes.grid(alpha=0.3)


def _bars(cells: list[Any]) -> list[list[float]]:
    low = [0.0 if c["low"] is None else max(0.0, c["accuracy"] - c["low"]) for c in cells]  # None: no end to draw
    return [low, [0.0 if c["high"] is None else max(0.0, c["high"] - c["accuracy"]) for c in cells]]


def _distinct(summary: Mapping[str, Any], key: str) -> list[str]:
    return list(dict.fromkeys(cell[key] for cell in summary["cells"]))
