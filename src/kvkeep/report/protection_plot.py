"""Protection explains the gap: each policy with its prompt protected and without, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Cell = Mapping[str, Any]
COLOURS = {"off": "#D55E00", "on": "#0072B2"}  # apart for colour-blind readers
LABELS = {"off": "nothing protected", "on": "prompt protected"}
_LEAST = 2  # policies that make a comparison


def pairs(cells: list[Cell]) -> dict[str, dict[str, Cell]]:
    """Cells of one model, task and budget that differ in protection alone: policy -> {"on": cell, "off": cell}."""
    found: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        side = {"prompt": "on", "none": "off"}.get(cell["protect"])
        if cell["budget"] is not None and side is not None and cell.get("schedule") != "published":
            settings = {k: v for k, v in cell["settings"].items() if k != "protect"}
            found.setdefault(f"{cell['policy']}{_other(settings)}", {})[side] = cell
    return {policy: sides for policy, sides in found.items() if len(sides) == len(COLOURS)}


def _other(settings: Mapping[str, Any]) -> str:
    """What else tells two arms of one policy apart."""
    told = {k: settings[k] for k in ("buffer", "window", "scope", "growth", "seed")}
    plain = {"buffer": told["buffer"], "window": None, "scope": "total", "growth": None, "seed": told["seed"]}
    rest = [f"{k}={v}" for k, v in told.items() if plain[k] != v]
    return f" {','.join(rest)}" if rest else ""


def panels(summary: Mapping[str, Any]) -> dict[tuple[str, str, float], dict[str, dict[str, Cell]]]:
    """(model, task, compression) -> pairs, where at least two policies were run both ways."""
    groups: dict[tuple[str, str, float], list[Cell]] = {}
    for cell in summary["cells"]:
        groups.setdefault((cell["model"], cell["task"], cell["compression"]), []).append(cell)
    made = {key: pairs(cells) for key, cells in groups.items()}
    return {key: found for key, found in made.items() if len(found) >= _LEAST}


def protection_figure(summary: Mapping[str, Any], path: Path) -> bool:
    """One panel a model, task and compression; a row a policy, ordered by its score without protection.

    Returns:
        False, and no file, if no two policies were run with and without protection.
    """
    found = panels(summary)
    if not found:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = max(len(policies) for policies in found.values())
    size = (1.6 + 3.6 * len(found), 1.6 + 0.27 * rows)
    figure, axes = plt.subplots(1, len(found), figsize=size, dpi=150, squeeze=False, sharex=True)
    for panel, (key, policies) in zip(axes[0], found.items(), strict=True):
        _draw(panel, key, policies, summary)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=3, frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.28 / size[1], 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
    return True


def _draw(
    axes: Any, key: tuple[str, str, float], policies: dict[str, dict[str, Cell]], summary: Mapping[str, Any]
) -> None:
    model, task, compression = key
    order = sorted(policies, key=lambda policy: (policies[policy]["off"]["accuracy"], policy))
    for step, policy in enumerate(order):
        ends = [policies[policy][side]["accuracy"] for side in COLOURS]
        axes.plot(ends, [step, step], color="#bbbbbb", linewidth=1, zorder=1)
    for shift, (side, colour) in zip((-0.12, 0.12), COLOURS.items(), strict=True):
        cells = [policies[policy][side] for policy in order]
        x = [cell["accuracy"] for cell in cells]
        low = [0.0 if c["low"] is None else max(0.0, c["accuracy"] - c["low"]) for c in cells]
        high = [0.0 if c["high"] is None else max(0.0, c["high"] - c["accuracy"]) for c in cells]
        y = [step + shift for step in range(len(order))]
        style = {"fmt": "o", "markersize": 4, "capsize": 2, "linewidth": 1.2, "color": colour}
        axes.errorbar(x, y, xerr=[low, high], label=LABELS[side], **style)
    full = [c for c in summary["cells"] if (c["model"], c["task"]) == (model, task) and c["budget"] is None]
    for cell in full[:1]:
        axes.axvline(cell["accuracy"], color="black", linestyle="--", linewidth=1, label="full cache")
    axes.set_yticks(range(len(order)), order, fontsize=7)
    axes.set_title(f"{model}\n{task}, {compression:g}x, n = {policies[order[0]]['on']['n']}", fontsize=8)
    axes.set_xlabel(f"{policies[order[0]]['on']['metric']}, 95% intervals", fontsize=8)
    axes.grid(axis="x", alpha=0.3)
