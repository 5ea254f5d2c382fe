"""Tables of a comparison, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

from rich.table import Table

from .tables import table

Cell = Mapping[str, Any]
MARK = "*"
NOTE = f"{MARK} samples on which no round ran: they are the full cache's."


def groups(summary: Mapping[str, Any]) -> Iterator[tuple[str, str, list[Cell]]]:
    """Cells of each model and task."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in summary["cells"]:
        found.setdefault((cell["model"], cell["task"]), []).append(cell)
    for (model, task), cells in found.items():
        yield model, task, cells


def score_rows(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: what each arm scored."""
    scheduled = any(cell.get("schedule") == "published" for cell in cells)
    columns = [
        "arm",
        "protect",
        *(["schedule"] if scheduled else []),
        "asked",
        "K",
        "real",
        f"{cells[0]['metric']}, 95%",
        "minus full, 95%",
        "p (sign)",
    ]
    rows = [
        [
            cell["arm"],
            cell["protect"],
            *([cell["schedule"]] if scheduled else []),
            f"{cell['compression']:g}x",
            "-" if cell["budget"] is None else str(cell["budget"]),
            "-" if cell["byte_compression"] is None else f"{cell['byte_compression']:.2f}x",
            f"{number(cell['accuracy'])} [{number(cell['low'])}, {number(cell['high'])}]",
            "-" if cell["diff_full"] is None else difference(cell["diff_full"], cell["diff_low"], cell["diff_high"]),
            "-" if cell["p_full"] is None else f"{cell['p_full']:.2g}" + ("" if cell["declared_full"] else " expl."),
        ]
        for cell in cells
    ]
    return columns, rows


def cost_rows(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: what each arm cost, and how its traces ended."""
    columns = ["arm", "asked", "entries", "peak", "KiB", "peak", "rounds", "tokens", "cut", "no ans.", "s/solved"]
    rows = []
    for cell in cells:
        samples = cell["n"] * cell["runs"]
        unevicted = f" {MARK}{cell['not_evicted']}" if cell["not_evicted"] else ""
        solved = cell["seconds_per_solved"]
        rows.append(
            [
                cell["arm"],
                f"{cell['compression']:g}x",
                f"{cell['mean_entries']:.0f}",
                f"{cell['peak_entries']:.0f}",
                f"{cell['mean_bytes'] / 1024:.0f}",
                f"{cell['peak_bytes'] / 1024:.0f}",
                f"{cell['rounds']:.1f}{unevicted}",
                f"{cell['mean_tokens']:.0f}",
                str(cell["truncated"]),
                str(samples - cell["answered"]),
                "-" if solved is None else f"{solved:.2f}",
            ]
        )
    return columns, rows


def metric_rows(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: the task's further metrics; no rows if it has none."""
    names = list(cells[0]["metrics"])
    rows = [[cell["arm"], f"{cell['compression']:g}x", *(_metric(cell, name) for name in names)] for cell in cells]
    return ["arm", "asked", *names], rows if names else []


def _metric(cell: Cell, name: str) -> str:
    low, high = cell["metric_intervals"].get(name, (None, None))
    value = number(cell["metrics"][name])
    return value if low is None or high is None else f"{value} [{number(low)}, {number(high)}]"


def comparison_rows(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of comparisons between arms."""
    several = len({(row["model"], row["task"]) for row in rows}) > 1
    columns = [
        *(["where"] if several else []),
        "comparison",
        "at",
        "difference, 95%",
        "win/loss/tie",
        "p (sign)",
        "p (Holm)",
    ]
    return columns, [
        [
            *([f"{row['model']}, {row['task']}"] if several else []),
            f"{row['a']} vs {row['b']}",
            f"{row['compression']:g}x",
            difference(row["difference"], row["low"], row["high"]),
            f"{row['wins']}/{row['losses']}/{row['ties']}",
            f"{row['p_sign']:.2g}",
            f"{row['p_holm']:.2g}" if "p_holm" in row else "exploratory",
        ]
        for row in rows
    ]


def terminal(summary: Mapping[str, Any]) -> list[Table]:
    """Two tables for each model and task: scores, and costs."""
    found = []
    for model, task, cells in groups(summary):
        runs = f", {cells[0]['runs']} runs each" if cells[0]["runs"] > 1 else ""
        title = f"{model}, {task}: {cells[0]['n']} problems{runs}"
        columns, rows = score_rows(cells)
        note = f"real: the full cache's mean bytes over the arm's, measured; {methods(summary, cells)}"
        found.append(table(title, columns, rows, caption=note))
        columns, rows = cost_rows(cells)
        note = NOTE if any(cell["not_evicted"] for cell in cells) else "entries of a KV head and KiB of a row, measured"
        found.append(table("cost, and how traces ended", columns, rows, caption=note))
        columns, rows = metric_rows(cells)
        if rows:
            found.append(
                table("further metrics: means over problems, intervals of those without bounds", columns, rows)
            )
        if cells[0]["caveat"]:
            found[-1].caption = "\n".join(filter(None, [str(found[-1].caption or ""), cells[0]["caveat"]]))
    if rows := summary["primary"]["comparisons"]:
        found.append(table("primary comparisons, declared before the run", *comparison_rows(rows)))
    return found


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def methods(summary: Mapping[str, Any], cells: Sequence[Cell]) -> str:
    """How the intervals of some cells were made, and what such intervals cover at this number of problems."""
    told = next(found for found in summary["coverage"] if cells[0]["task"] in found["tasks"])
    made = ", ".join(sorted({cell["interval"] for cell in cells}))
    return (
        f"intervals: {made}; 95% intervals covered {number(told['mean'])} at n = {told['n']} in simulations of "
        f"{told['scores']} scores, {number(told['least'])} in the worst of {told['scenarios']} scenarios"
    )


def checked(told: Mapping[str, Any]) -> str:
    """What the check of batches said."""
    if not told["samples"]:
        return "Not checked whether batches change results: no sample was run again alone."
    return f"{told['samples']} samples were run again alone, {told['different']} came out differently."


def number(value: float | None) -> str:
    """Three digits behind the point, and none before it if that is 0: tables must fit. None is an open end."""
    if value is None or not isfinite(value):
        return "open"
    text = f"{value:.3f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def signed(value: float | None) -> str:
    """With its sign."""
    return ("+" if value is not None and value >= 0 else "") + number(value)


def difference(value: float, low: float | None, high: float | None) -> str:
    """A difference and its interval."""
    return f"{signed(value)} [{signed(low)}, {signed(high)}]"
