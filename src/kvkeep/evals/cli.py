"""``kvkeep compare``: policies x budgets x tasks x models, with statistics that can say no."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..report.files import check_writable, write_json

if TYPE_CHECKING:
    from .config import Config

WIDTH = 110  # of tables that go into a file or pipe; a terminal has its own
out = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH)
err = Console(stderr=True)
POLICIES = ("full", "random", "random:protect=none", "random:draw=model", "streaming", "recency")

Models = Annotated[list[str] | None, typer.Option("--model", help="Hub id, folder or name; may be repeated.")]
Tasks = Annotated[list[str] | None, typer.Option("--task", help="NAME[:key=value,...]; may be repeated.")]
Arms = Annotated[
    list[str] | None,
    typer.Option("--policy", help="NAME[:key=value,...], e.g. random:protect=none,label=bare; may be repeated."),
]


def compare(
    model: Models = None,
    task: Tasks = None,
    policy: Arms = None,
    compression: Annotated[str | None, typer.Option(help="K = mean length / compression; joined by commas.")] = None,
    budget: Annotated[str | None, typer.Option(help="Budgets K instead, joined by commas.")] = None,
    buffer: Annotated[int, typer.Option(help="r: tokens between two rounds, and the newest always kept.")] = 16,
    problems: Annotated[int, typer.Option(help="Problems of each task.")] = 100,
    runs: Annotated[int, typer.Option(help="Runs of each problem, averaged before any statistics.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the problem sets, the draws and the token choice.")] = 0,
    batch: Annotated[int, typer.Option(help="Rows of a batch at most.")] = 50,
    workers: Annotated[int, typer.Option(min=0, help="Processes; they share the cores. 0: run in this one.")] = 2,
    primary: Annotated[
        list[str] | None, typer.Option(help="'A vs B' or 'A vs B @2': declared before the run; may be repeated.")
    ] = None,
    folder: Annotated[Path, typer.Option("--out", help="Results folder; the same command goes on in it.")] = Path(
        "results/compare"
    ),
    json: Annotated[Path | None, typer.Option("--json", help="Also write cells.json here.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Say what would run and what it could tell; run nothing.")] = (
        False
    ),
    difference: Annotated[float, typer.Option(help="With --plan: the difference that should be seen.")] = 0.1,
    discordant: Annotated[
        float | None, typer.Option(help="With --plan: share of problems on which two arms differ, from a pilot.")
    ] = None,
    sd: Annotated[
        float | None, typer.Option(help="With --plan: standard deviation of a problem's difference, from a pilot.")
    ] = None,
    check: Annotated[int, typer.Option(help="Samples run again alone, to see that batches change nothing.")] = 4,
    texts: Annotated[bool, typer.Option("--texts", help="Keep every trace.")] = False,
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Resume although versions, code or threads differ; marks it.")
    ] = False,
    engine: Annotated[str, typer.Option(help="transformers")] = "transformers",
    dtype: Annotated[str | None, typer.Option(help="Default: float32 on CPU, else the checkpoint's own.")] = None,
    attention: Annotated[str, typer.Option(help="sdpa, eager, ...: the same for every arm, full included.")] = "sdpa",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default: the GPU if there is one.")] = None,
    temperature: Annotated[float | None, typer.Option(help="For tasks that sample.")] = None,
    top_p: Annotated[float | None, typer.Option(help="For tasks that sample.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="For tasks that take it.")] = None,
) -> None:
    """Compare policies at equal budgets: scores, costs, paired intervals; resumes after a kill."""
    check_writable(json)
    from .config import Config, Primary
    from .preview import show_plan
    from .tasks import with_options

    sampling = {"temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens}
    given = {name: value for name, value in sampling.items() if value is not None}
    from .arms import parse_arms

    arms = parse_arms(policy or POLICIES)
    labels = [arm.label for arm in arms]
    levels = "2,4" if compression is None and budget is None else compression
    config = Config(
        models=tuple(model or ["abacus"]),
        tasks=tuple(with_options(text, given) for text in task or ["abacus"]),
        arms=arms,
        compressions=tuple(_numbers(levels, "--compression", float)),
        budgets=tuple(_numbers(budget, "--budget", int)),
        buffer=buffer,
        problems=problems,
        runs=runs,
        seed=seed,
        batch=batch,
        check=check,
        primary=tuple(Primary.parse(text, labels) for text in primary or []),
        backend=backend(engine, dtype, attention, device),
        texts=texts,
    )
    if plan:
        show_plan(config, difference, discordant, sd, json, out)
        return
    carry_out(config, folder, workers=workers, allow_mixed=allow_mixed, json=json)


def backend(engine: str, dtype: str | None, attention: str, device: str | None) -> Any:
    """How models run, with every default filled in."""
    import torch

    from .engines import Backend

    place = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Backend(engine, dtype or ("float32" if place == "cpu" else "auto"), attention, place)


def carry_out(
    config: Config, folder: Path, *, workers: int, allow_mixed: bool = False, json: Path | None = None
) -> dict[str, Any]:
    """Run what is missing, write the report, print tables and reading.

    Returns:
        What ``cells.json`` holds.

    Raises:
        RuntimeError: nothing was evicted in a cell, or batches change results; the results are written all the same.
        typer.Exit: 130 after Ctrl-C.
    """
    import json as json_module

    from ..report.compare_files import figures, write_all
    from ..report.compare_tables import checked, terminal
    from .reading import read
    from .run import Interrupted, execute, prepare
    from .summary import failures, pair_up, summarise

    prepared = prepare(config)
    try:
        run = execute(prepared, folder, workers=workers, allow_mixed=allow_mixed, console=err)
    except Interrupted as stopped:
        err.print(str(stopped), soft_wrap=True)
        raise typer.Exit(130) from None
    pairs = pair_up(run)
    summary = summarise(run, pairs)
    reading = read(run, summary, pairs)
    environment = json_module.loads((folder / "environment.json").read_text())
    write_all(folder, summary, reading, environment)
    if json is not None:
        write_json(json, {**summary, "reading": reading, "environment": environment})
    for made in terminal(summary):
        out.print(made)
    out.print(reading, markup=False, highlight=False)
    out.print(f"\n{checked(summary['check'])}")
    out.print(f"report: {folder / 'report.md'}   figures: {', '.join(str(folder / name) for name in figures(summary))}")
    if found := failures(summary):
        raise RuntimeError("\n".join(found))
    return summary


def _numbers(text: str | None, option: str, kind: Any) -> list[Any]:
    if text is None:
        return []
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{option} takes numbers joined by commas, e.g. 2,4; got {text!r}") from error
