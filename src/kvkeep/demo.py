"""The first thing a newcomer sees: six policies on abacus, in under two minutes. A preset of ``kvkeep compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .evals.cli import POLICIES, backend, carry_out
from .report.files import check_writable

TASK = "abacus:n=16,mode=r2"
COMPRESSIONS = (2.0, 4.0)
BUFFER = 16


def demo(
    folder: Annotated[Path, typer.Option("--out", help="Folder for numbers, report and figures.")] = Path(
        "results/demo"
    ),
    model: Annotated[str, typer.Option(help="An abacus checkpoint: a name or a folder.")] = "abacus",
    problems: Annotated[int, typer.Option(help="Problems of each cell.")] = 60,
    workers: Annotated[int, typer.Option(min=0, help="Processes; they share the cores.")] = 2,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the numbers to this file.")] = None,
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Resume although versions, code or threads differ; marks it.")
    ] = False,
) -> None:
    """Compare the full cache, random (three ways), streaming and a window on abacus, at 2x and 4x."""
    check_writable(json)
    from .evals.arms import parse_arms
    from .evals.config import Config

    config = Config(
        models=(model,),
        tasks=(TASK,),
        arms=parse_arms(POLICIES),
        compressions=COMPRESSIONS,
        buffer=BUFFER,
        problems=problems,
        backend=backend("transformers", None, "sdpa", None),
    )
    carry_out(config, folder, workers=workers, allow_mixed=allow_mixed, json=json)
