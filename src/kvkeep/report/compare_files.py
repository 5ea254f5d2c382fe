"""Everything a finished comparison leaves in its folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .compare_plots import cost_figure, score_figure
from .compare_tables import (
    NOTE,
    checked,
    comparison_rows,
    cost_rows,
    groups,
    markdown,
    methods,
    metric_rows,
    score_rows,
)
from .files import write_json, write_text
from .protection_plot import panels, protection_figure

#: Figures that every results folder has.
FIGURES = {"score.png": score_figure, "cost.png": cost_figure}
#: Drawn where policies were run with and without a protected prompt.
PROTECTION = "protection.png"


def figures(summary: Mapping[str, Any]) -> list[str]:
    """Names of the figures in the results folder."""
    return [*FIGURES, *([PROTECTION] if panels(summary) else [])]


def write_all(folder: Path, summary: Mapping[str, Any], reading: str, environment: Mapping[str, Any]) -> None:
    """Write ``cells.json``, ``report.md`` and the figures; each is whole or absent."""
    write_json(folder / "cells.json", {**summary, "reading": reading, "environment": environment})
    draw = {**FIGURES, PROTECTION: protection_figure}
    for name in figures(summary):
        work = folder / f".{name}"
        draw[name](summary, work)
        os.replace(work, folder / name)
    write_text(folder / "report.md", report(summary, reading, environment))


def report(summary: Mapping[str, Any], reading: str, environment: Mapping[str, Any]) -> str:
    """The report in Markdown."""
    parts = ["# Comparison", reading, "![score against compression](score.png)", "![score against bytes](cost.png)"]
    if panels(summary):
        parts.append(f"![what protecting the prompt does to each policy]({PROTECTION})")
    for model, task, cells in groups(summary):
        parts.append(f"## {model}, {task}")
        parts.append(f"{cells[0]['n']} problems, {cells[0]['runs']} run(s) each; {methods(summary, cells)}.")
        if cells[0]["caveat"]:
            parts.append(f"*{cells[0]['caveat']}*")
        tables = [score_rows(cells), cost_rows(cells), metric_rows(cells)]
        parts += [markdown(columns, rows) for columns, rows in tables if rows]
        if any(cell["not_evicted"] for cell in cells):
            parts.append(NOTE.replace("*", "\\*"))
    parts += _comparisons(summary)
    told = summary["check"]
    parts.append("## Checks")
    parts.append(checked(told))
    if summary["mixed"]:
        parts.append("**Mixed: this folder was resumed with other versions or threads than it was begun with.**")
    parts += ["## How it was made", _how(summary, environment)]
    return "\n\n".join(parts) + "\n"


def _comparisons(summary: Mapping[str, Any]) -> list[str]:
    found = []
    for title, note, rows in (
        ("Primary comparisons", "Declared before the run; Holm's correction over this family.",
         summary["primary"]["comparisons"]),
        ("Exploratory comparisons", "Not declared before the run: reasons to run again, not findings.",
         summary["comparisons"]),
    ):  # fmt: skip
        if not rows:
            continue
        found += [f"## {title}", note]
        several = len({(row["model"], row["task"]) for row in rows}) > 1
        for model, task in dict.fromkeys((row["model"], row["task"]) for row in rows):
            if several:
                found.append(f"{model}, {task}:")
            mine = [row for row in rows if (row["model"], row["task"]) == (model, task)]
            found.append(markdown(*comparison_rows(mine)))
    return found


def _how(summary: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    config, session = summary["config"], environment["sessions"][0]
    times = ", ".join(session["started"] for session in environment["sessions"])
    processor = session["fixed"]["processor"] or session["platform"]
    versions = ", ".join(f"{name} {number}" for name, number in session["fixed"]["versions"].items())
    git = session["git"]["kvkeep"]
    state = "not in a git repository" if git is None else git["commit"] + (" (dirty)" if git["dirty"] else "")
    backend = config["backend"]
    return "\n".join(
        [
            f"- command: `{' '.join(map(str, session['command']))}`",
            f"- engine {backend['engine']}, attention {backend['attention']}, {backend['dtype']}, on "
            f"{backend['device']}, the same for every arm; batches of {config['batch']}, "
            f"{session['fixed']['threads']} thread(s) a worker",
            f"- seed {config['seed']}, r = {config['buffer']}, {config['problems']} problems, {config['runs']} run(s)",
            f"- {versions}; kvkeep {state}",
            f"- {processor}, {session['cores']} cores; begun, and gone on with: {times}",
        ]
    )
