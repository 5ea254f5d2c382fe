"""The first thing a newcomer sees: one prompt, the full cache and a bounded one, side by side."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .engine import Sampling
from .hf.cache import EvictCache
from .hf.engine import HFEngine
from .hf.load import encode_prompt, load
from .report.files import versions, write_json
from .report.plots import cache_bytes_plot
from .report.tables import mib, table
from .settings import Settings

PROMPT = (
    "A train leaves the station at 9 in the morning and travels at 60 kilometres an hour. A second train leaves "
    "the same station at 10 and follows it at 90 kilometres an hour. Explain step by step when and where the "
    "second train catches up with the first."
)


def run(
    console: Console, out: Path, *, model: str = "smollm2", tokens: int = 600, budget: int = 128, buffer: int = 32
) -> dict[str, Any]:
    """Generate the same number of tokens under ``full`` and ``random`` and record every step.

    Args:
        console: where the progress bars go.
        out: folder for ``demo.json`` and ``cache_bytes.png``.
        model: hub id, local folder or ``smollm2``.
        tokens: length of each trace; the end token is suppressed so that both reach it.
        budget: K of ``random``.
        buffer: r of ``random``.

    Returns:
        What ``demo.json`` holds: settings, versions and one row a policy.
    """
    language_model, tokenizer = load(model)
    prompt = encode_prompt(tokenizer, PROMPT)
    arms = [Settings("full"), Settings("random", budget=budget, buffer=buffer)]
    rows, series = [], {}
    columns = (TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bars = [progress.add_task(arm.policy, total=tokens) for arm in arms]
        for bar, arm in zip(bars, arms, strict=True):
            points: list[tuple[int, int]] = []

            def watch(cache: EvictCache, points: list[tuple[int, int]] = points, bar: Any = bar) -> None:
                points.append((cache.get_seq_length(), cache.nbytes()))
                progress.advance(bar)

            engine = HFEngine(language_model, tokenizer, arm)
            started = time.perf_counter()
            sample = engine.generate([prompt], [0], Sampling(max_new_tokens=tokens, ignore_end=True), on_token=watch)[0]
            rows.append(_row(arm, sample.stats, sample.text, tokens, time.perf_counter() - started))
            series[arm.policy] = points
    result = {"model": model, "prompt_tokens": len(prompt), "trace_tokens": tokens, "end_token": "suppressed",
              "seed": arms[-1].seed, "versions": versions(), "rows": rows}  # fmt: skip
    write_json(out / "demo.json", {**result, "cache_bytes": series})
    cache_bytes_plot(series, out / "cache_bytes.png", f"{model}: K={budget}, r={buffer}, prompt {len(prompt)} tokens")
    return result


def _row(arm: Settings, stats: dict[str, Any], text: str, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        "policy": arm.policy,
        "settings": arm.to_dict(),
        "tokens_per_s": tokens / seconds,
        "seconds": seconds,
        "peak_bytes": stats["bytes"]["peak"],
        "final_bytes": stats["bytes"]["now"],
        "rounds": stats["rounds"],
        "entries_kept": stats["entries"],
        "entries_evicted": stats["evicted"],
        "text": text,
    }


def summary(result: dict[str, Any]) -> Table:
    """The demo's table."""
    return table(
        f"{result['model']}: {result['prompt_tokens']} prompt tokens, {result['trace_tokens']} generated "
        "(end token suppressed, greedy)",
        ["policy", "tokens/s", "peak cache", "final cache", "rounds", "entries kept a head"],
        [
            (r["policy"], f"{r['tokens_per_s']:.1f}", mib(r["peak_bytes"]), mib(r["final_bytes"]), r["rounds"],
             r["entries_kept"])
            for r in result["rows"]
        ],
        caption="One run of each on this machine: tokens/s is a reading, not a benchmark (kvkeep bench decode is).",
    )  # fmt: skip
