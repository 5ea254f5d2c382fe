"""From samples to cells: what ``cells.json`` holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from . import stats
from .cells import Cell
from .compared import Pair, Pairs, comparisons, finite
from .coverage import Metric, measure
from .environment import all_versions
from .run import Run
from .tasks import make_task

Line = dict[str, Any]
#: A run whose batch checks differ more often than this cannot be trusted.
TOLERATED = 0.25


def pair_up(run: Run) -> Pairs:
    """The comparisons of a run, for summary and reading: each interval is made once.

    Raises:
        RuntimeError: a cell lacks samples; nothing is ever dropped silently.
    """
    scores = {name: scores_of(rows) for name, rows in _by_cell(run).items()}
    return Pairs(run.prepared.config, run.prepared.cells, scores)


def summarise(run: Run, pairs: Pairs | None = None) -> dict[str, Any]:
    """Everything a reader needs, ready for JSON.

    Args:
        run: the finished comparison.
        pairs: what :func:`pair_up` made of it, if it is there already.

    Raises:
        RuntimeError: see :func:`pair_up`.
    """
    config, cells = run.prepared.config, run.prepared.cells
    lines = _by_cell(run)
    pairs = pairs or pair_up(run)
    primary, others = comparisons(pairs)
    caveats = {model.name: model.caveat for model in run.prepared.models}
    return {
        "cells": [_cell(cell, lines[cell.id], pairs, lines, caveats[cell.model]) for cell in cells],
        "primary": {"declared": [p.text for p in config.primary], "comparisons": primary},
        "comparisons": others,
        "coverage": _coverage(run),
        "check": check(run),
        "mixed": run.mixed,
        "config": run.prepared.to_dict(),
        "versions": all_versions(),
    }


def scores_of(rows: Sequence[Line]) -> dict[str, list[float]]:
    """Scores of each problem, one a run; sorted, so that the order of problems changes nothing."""
    found: dict[str, list[float]] = {}
    for row in sorted(rows, key=lambda row: (row["problem"], row["run"])):
        found.setdefault(row["problem"], []).append(row["score"])
    return found


def _coverage(run: Run) -> list[dict[str, Any]]:
    """What the 95% intervals of each kind of score cover at this number of problems, by simulation."""
    config = run.prepared.config
    kinds: dict[Metric, list[str]] = {}
    for task in map(make_task, config.tasks):
        kind: Metric = "unbounded" if task.bounds is None else "binary" if task.metric == "accuracy" else "graded"
        kinds.setdefault(kind, []).append(task.name)
    found = []
    for kind, tasks in kinds.items():
        told = measure(config.problems, kind, 1 if kind == "unbounded" else config.runs)
        found.append({"tasks": tasks, "n": config.problems, "scores": kind, **asdict(told)})
    return found


def check(run: Run) -> dict[str, Any]:
    """Samples that were run again alone: how many came out differently."""
    beside = {(row["cell"], row["problem"], row["run"]): row for row in run.samples}
    rows = [{"cell": row["cell"], "problem": row["problem"], "run": row["run"],
             "same": same(row, beside[row["cell"], row["problem"], row["run"]])} for row in run.checks]  # fmt: skip
    return {"samples": len(rows), "different": sum(not row["same"] for row in rows), "rows": rows}


def same(alone: Line, batched: Line) -> bool:
    """Whether two runs of a sample agree: the same trace where there is one, else the same numbers."""
    if alone["digest"] or batched["digest"]:
        return bool(alone["digest"] == batched["digest"])
    a, b = ({"score": row["score"], **row["metrics"]} for row in (alone, batched))
    return a.keys() == b.keys() and all(math.isclose(a[k], b[k], rel_tol=1e-3, abs_tol=1e-4) for k in a)


def failures(summary: Mapping[str, Any]) -> list[str]:
    """What makes a finished run fail: cells in which nothing was evicted, batches that change results."""
    found = []
    for cell in summary["cells"]:
        if cell["budget"] is not None and cell["not_evicted"] == cell["n"] * cell["runs"]:
            found.append(
                f"cell {cell['id']}: no round ran on any sample, so this is the full cache: K={cell['budget']} is "
                f"above the length ({cell['mean_length']:.0f} tokens on average). Lower the budget, or use longer "
                "problems."
            )
    told = summary["check"]
    if told["different"] > TOLERATED * told["samples"]:
        found.append(
            f"{told['different']} of {told['samples']} samples came out differently alone than in their batch; "
            "rounding flips a near-tie now and then, but not so many. Results depend on the batch size (see "
            "checks.jsonl)."
        )
    return found


def _by_cell(run: Run) -> dict[str, list[Line]]:
    config = run.prepared.config
    found: dict[str, list[Line]] = {cell.id: [] for cell in run.prepared.cells}
    for row in run.samples:
        found[row["cell"]].append(row)
    items = {(s.model, s.task): s.items for s in run.prepared.sets}
    for cell in run.prepared.cells:
        wanted = {(item.id, r) for item in items[cell.model, cell.task] for r in range(config.runs)}
        keys = [(row["problem"], row["run"]) for row in found[cell.id]]
        if len(keys) != len(set(keys)) or set(keys) != wanted:
            there = len(set(keys) & wanted)
            raise RuntimeError(f"cell {cell.id} has {there} of its {len(wanted)} samples: run the comparison again")
    return found


def _cell(cell: Cell, rows: list[Line], pairs: Pairs, lines: Mapping[str, list[Line]], caveat: str) -> dict[str, Any]:
    arm, task = pairs.arms[cell.arm], make_task(cell.task)
    interval = stats.mean_interval(pairs.scores[cell.id], bounds=task.bounds)
    full = pairs.full(cell)
    told = pairs.compare(Pair(cell, full)) if full is not None else None
    rows = sorted(rows, key=lambda row: (row["problem"], row["run"]))
    mean_bytes = _mean(rows, "mean_bytes")
    return {
        "id": cell.id,
        "model": cell.model,
        "task": cell.task,
        "arm": cell.arm,
        "policy": arm.text,
        "protect": arm.protect if arm.evicts else "-",
        "schedule": arm.schedule if arm.evicts else "-",
        "settings": cell.settings.to_dict(),
        "caveat": caveat,
        "compression": cell.compression,
        "budget": cell.budget,
        "level": cell.level,
        "n": len(pairs.scores[cell.id]),
        "runs": pairs.config.runs,
        "metric": task.metric,
        "accuracy": interval.estimate,
        "value": interval.estimate,
        "low": finite(interval.low),
        "high": finite(interval.high),
        "interval": interval.method,
        "diff_full": None if told is None else told.difference.estimate,
        "diff_low": None if told is None else finite(told.difference.low),
        "diff_high": None if told is None else finite(told.difference.high),
        "p_full": None if told is None else told.p_sign,
        "declared_full": full is not None and pairs.declared(cell, full),
        "mean_bytes": mean_bytes,
        "peak_bytes": max(row["peak_bytes"] for row in rows),
        "mean_entries": _mean(rows, "mean_entries"),
        "peak_entries": max(row["peak_entries"] for row in rows),
        "byte_compression": None if full is None else _mean(lines[full.id], "mean_bytes") / mean_bytes,
        "rounds": _mean(rows, "rounds"),
        "evicted": _mean(rows, "evicted"),
        "not_evicted": sum(row["rounds"] == 0 for row in rows) if cell.budget is not None else 0,
        "answered": sum(row["answered"] for row in rows),
        "truncated": sum(row["truncated"] for row in rows),
        "mean_tokens": _mean(rows, "tokens"),
        "mean_length": fmean(row["tokens"] + row["prompt_tokens"] for row in rows),
        **_metrics(task, rows),
        **_time(task, rows),
    }


def _metrics(task: Any, rows: Sequence[Line]) -> dict[str, Any]:
    """Means of the further metrics over problems; beside a score without bounds with 95% intervals."""
    means: dict[str, float] = {}
    intervals: dict[str, list[float | None]] = {}
    for name in rows[0]["metrics"]:
        scores: dict[str, list[float]] = {}
        for row in rows:
            scores.setdefault(row["problem"], []).append(row["metrics"][name])
        means[name] = fmean(fmean(runs) for _, runs in sorted(scores.items()))
        if task.bounds is None:
            told = stats.mean_interval(scores, bounds=None)
            intervals[name] = [finite(told.low), finite(told.high)]
    if "nll" in means:  # perplexity is that of all tokens together, not a mean of perplexities
        means["perplexity"] = math.exp(means["nll"])
        if "nll" in intervals:
            intervals["perplexity"] = [None if end is None else math.exp(end) for end in intervals["nll"]]
    return {"metrics": means, "metric_intervals": intervals}


def _time(task: Any, rows: Sequence[Line]) -> dict[str, float | None]:
    """Wall-clock fields: the only ones that differ between two runs of one comparison."""
    seconds = sum(row["seconds"] for row in rows)
    solved = sum(row["score"] for row in rows) if task.metric == "accuracy" else 0.0
    return {"seconds_per_problem": seconds / len(rows), "seconds_per_solved": seconds / solved if solved else None}


def _mean(rows: Sequence[Line], key: str) -> float:
    return fmean(row[key] for row in rows)
