"""What the runs of ``kvkeep bench serve`` say: ratios with intervals, floors, a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Run = dict[str, Any]
Row = dict[str, Any]

BASES = ("stock", "random")  # arms that others are compared with
ABLATIONS = {"gather", "one-by-one", "reserve"}  # arms that are compared with "random"
_SPEEDS = {"tokens_per_s": "wall_s", "tokens_per_cpu_s": "cpu_s"}
_COUNTS = ("preemptions", "running_mean", "running_peak", "blocks_peak", "rounds", "evicted_entries", "steps")
_FACTS = ("pool", "concurrency")


def ratio(arm: Sequence[float], base: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Geometric mean of paired ratios and its interval, Student's t on their logarithms.

    Args:
        arm: speeds, one a turn.
        base: speeds of the arm to compare with, in the same turns.
        level: coverage.

    Returns:
        Ratio, lower and upper end; the ends are 0 and infinity after a single turn, which says nothing about noise.
    """
    logs = np.log(np.asarray(arm, dtype=np.float64)) - np.log(np.asarray(base, dtype=np.float64))
    mean = float(logs.mean())
    if len(logs) < 2:
        return float(np.exp(mean)), 0.0, float("inf")
    half = float(stats.t.ppf((1 + level) / 2, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs)))
    return float(np.exp(mean)), float(np.exp(mean - half)), float(np.exp(mean + half))


def summary(runs: Sequence[Run]) -> list[Row]:
    """One row a cell and arm.

    Returns:
        Rows with ``regime``, ``length``, ``arm``, ``turns``; ``tokens_per_s`` and ``tokens_per_cpu_s`` (medians);
        ``round_share`` of the time and other counts (means over turns); and, for each of :data:`BASES` that ran in the
        same turns, ``over_<base>`` (by the clock) and ``cpu_over_<base>``: [ratio, low, high], null where unknown.
    """
    cells = dict.fromkeys((r["regime"], r["length"]) for r in runs)
    rows = []
    for regime, length in cells:
        here = [r for r in runs if (r["regime"], r["length"]) == (regime, length)]
        by_arm: dict[str, dict[int, Run]] = {}
        for r in here:
            by_arm.setdefault(r["arm"], {})[r["turn"]] = r
        rows += [_row(regime, length, arm, by_arm) for arm in by_arm]
    return rows


def _row(regime: str, length: int, arm: str, by_arm: dict[str, dict[int, Run]]) -> Row:
    own = by_arm[arm]
    row: Row = {"regime": regime, "length": length, "arm": arm, "turns": len(own)}
    for name, seconds in _SPEEDS.items():
        row[name] = float(np.median([r["tokens"] / r[seconds] for r in own.values()]))
    row["round_share"] = float(np.mean([r["round_seconds"] / r["wall_s"] for r in own.values()]))
    row |= {name: float(np.mean([r[name] for r in own.values()])) for name in _COUNTS}
    first = next(iter(own.values()))
    row |= {name: first[name] for name in _FACTS}
    for base in BASES:
        both = sorted(own.keys() & by_arm.get(base, {}).keys())
        if arm in (base, "stock") or not both:
            continue
        for prefix, seconds in (("", "wall_s"), ("cpu_", "cpu_s")):
            # The same tokens in both, so the ratio of speeds is the inverse ratio of times.
            found = ratio([1 / own[t][seconds] for t in both], [1 / by_arm[base][t][seconds] for t in both])
            row[f"{prefix}over_{base}"] = [x if np.isfinite(x) and x > 0 else None for x in found]
    return row


def floors(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What the vLLM engine promises, and what these rows say about it.

    Returns:
        ``what``, ``floor``, ``found``, ``low``, ``high`` and ``held`` (by the estimate) of each promise that rows speak
        about: arm "random" against "stock" at the longest output in a full pool, and at the shortest if it is too
        short for rounds; and the share of time in rounds.
    """
    ours = [r for r in rows if r["arm"] == "random"]
    found: list[dict[str, Any]] = []

    def against_stock(where: str, floor: float, row: Row) -> None:
        value, low, high = row["over_stock"]
        found.append({"what": where, "floor": floor, "found": value, "low": low, "high": high, "held": value >= floor})

    most, least = max((r["length"] for r in ours), default=0), min((r["length"] for r in ours), default=0)
    for row in ours:
        cell = f"random / stock, {row['regime']} pool, {row['length']} tokens"
        if "over_stock" not in row:
            continue
        if row["rounds"] and row["regime"] == "full" and row["length"] == most:
            against_stock(cell, 1.5, row)
        elif not row["rounds"] and row["length"] == least:
            against_stock(cell, 0.97, row)
    evicting = [r for r in ours if r["rounds"]]
    if evicting:
        worst = max(evicting, key=lambda r: float(r["round_share"]))
        share = worst["round_share"]
        where = f"share of time in rounds, {worst['regime']} pool, {worst['length']} tokens"
        found.append({"what": where, "floor": 0.02, "found": share, "low": None, "high": None, "held": share < 0.02})
    return found


def tables(result: dict[str, Any]) -> RenderableType:
    """The rows as two tables; ``--json`` has all numbers."""
    from rich.console import Group

    return Group(_speeds(result), _counts(result))


def _speeds(result: dict[str, Any]) -> Table:
    from ..report.tables import table as make

    def against(row: Row, key: str) -> str:
        if key not in row:
            return "-"
        value, low, high = row[key]
        return f"{value:.2f}" if low is None or high is None else f"{value:.2f} [{low:.2f},{high:.2f}]"

    rows, settings = result["rows"], result["settings"]
    arms = {row["arm"] for row in rows}
    ratios = {"over_stock": "/ stock", "cpu_over_stock": "/ stock,\nper cpu-s"} if "stock" in arms else {}
    if arms & ABLATIONS:
        ratios["over_random"] = "/ random"
    return make(
        f"Serving, vLLM {result.get('vllm', '-')}: {settings['model']}, prompts of {settings['prompt']}, "
        f"K={settings['budget']}, r={settings['buffer']}, {settings['dtype']} ({result['device']}, "
        f"{settings['threads']} threads)",
        ["pool", "tokens", "arm", "tok/s", "tok/\ncpu-s", *ratios.values()],
        [
            (
                *(row["regime"], row["length"], row["arm"]),
                *(f"{row[name]:.0f}" for name in _SPEEDS),
                *(against(row, key) for key in ratios),
            )
            for row in rows
        ],
        caption="ratios: geometric mean over turns, 95% interval (t on logarithms)",
    )


def _counts(result: dict[str, Any]) -> Table:
    from ..report.tables import table as make

    heads = ["running\nmean", "\npeak", "pre-\nempted", "blocks\npeak", "\npool", "rounds,\n% of time", "fit at\nstart"]
    return make(
        "What the scheduler did",
        ["pool", "tokens", "arm", *heads],
        [
            (
                *(row["regime"], row["length"], row["arm"], f"{row['running_mean']:.1f}"),
                *(f"{row[name]:.0f}" for name in ("running_peak", "preemptions", "blocks_peak", "pool")),
                f"{100 * row['round_share']:.2f}",
                "-" if row["concurrency"] is None else f"{row['concurrency']:.1f}",
            )
            for row in result["rows"]
        ],
        caption="means over turns; running: requests in a step; fit at start: how many of this length fit at once, "
        "says vLLM",
    )


def floor_lines(result: dict[str, Any]) -> list[str]:
    """The promises, one a line."""
    lines = []
    for f in result["floors"]:
        below = "share" in f["what"]
        value = f"{100 * f['found']:.2f}%" if below else f"{f['found']:.2f}"
        if f["low"] is not None and f["high"] is not None:
            value += f" [{f['low']:.2f}, {f['high']:.2f}]"
        floor = f"under {100 * f['floor']:.0f}%" if below else f"at least {f['floor']}"
        lines.append(f"{'held' if f['held'] else 'NOT HELD'}: {f['what']}: {value} ({floor})")
    return lines
