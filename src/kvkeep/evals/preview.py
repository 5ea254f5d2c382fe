"""``kvkeep compare --plan``: what would run, and what it could tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from ..report.files import write_json
from ..report.tables import table
from .compared import declared_pairs
from .config import Config
from .power import DISCORDANT, Test, problems_needed
from .run import Prepared, expected_tokens, prepare
from .tasks import make_task


def show_plan(
    config: Config, difference: float, discordant: float | None, sd: float | None, json: Path | None, out: Console
) -> None:
    """Print cells, batches and tokens, and how many problems a difference needs; nothing runs.

    Args:
        config: the comparison.
        difference: that should be seen, in units of the score.
        discordant: share of problems on which two arms differ; None: assumed.
        sd: standard deviation of a problem's difference, instead.
        json: also write it there.
        out: where to print.

    Raises:
        ValueError: a value is out of range, or the comparison cannot be prepared.
    """
    prepared = prepare(config)
    rows = []
    for cell in prepared.cells:
        mine = [batch for batch in prepared.batches if batch.cell == cell.id]
        k = "-" if cell.budget is None else cell.budget
        rows.append((cell.arm, cell.model, cell.task, f"{cell.compression:g}x", k, len(mine), expected_tokens(mine)))
    columns = ["arm", "model", "task", "asked", "K", "batches", "tokens"]
    out.print(table(f"{len(prepared.cells)} cells", columns, rows))
    tokens = expected_tokens([*prepared.batches, *prepared.checks])
    out.print(
        f"{len(prepared.batches)} batches and {len(prepared.checks)} samples to check, about {tokens:,} tokens "
        "(prompts included)"
    )
    power = _power(prepared, difference, discordant, sd)
    out.print(power["text"])
    if json is not None:
        cells = [dict(zip(columns, row, strict=True)) for row in rows]
        write_json(json, {"cells": cells, "tokens": tokens, "power": power, "config": prepared.to_dict()})


def _power(prepared: Prepared, difference: float, discordant: float | None, sd: float | None) -> dict[str, Any]:
    config = prepared.config
    unbounded = any(make_task(text).bounds is None for text in config.tasks)
    if unbounded and sd is None:
        text = (
            "how many problems scores without bounds need depends on their spread: pass --sd, the standard deviation "
            "of a problem's difference in a pilot, and --difference in the score's unit"
        )
        return {"text": text, "needed": None}
    if not unbounded and not 0 < difference < 1:
        raise ValueError(f"--difference must lie in (0, 1), got {difference}")
    declared = len(declared_pairs(config, prepared.cells))
    # Declared comparisons are judged by the exact sign test, where its power is known: it is the stricter one.
    test: Test = "sign" if declared and config.runs == 1 and sd is None else "interval"
    level = 1 - 0.05 / max(1, declared)
    needed = problems_needed(difference, discordant=discordant, sd=sd, runs=config.runs, level=level, test=test)
    verdict = "enough" if config.problems >= needed else f"not enough: pass --problems {needed}"
    judged = f" by the {'sign test' if test == 'sign' else 'interval'}"
    family = f", as one of {declared} primary comparisons under Holm's correction," if declared > 1 else ""
    if sd is not None:
        assumed = f"standard deviation of a problem's difference: {sd:g}"
    elif discordant is not None:
        assumed = f"two arms differ on {discordant:.0%} of them"
    else:
        assumed = f"assumed: two arms differ on {max(DISCORDANT, difference):.0%} of them; --discordant says better"
    text = (
        f"to see a difference of {difference:g} with 80% power at the 95% level{judged}{family} takes about {needed} "
        f"problems; {config.problems} are {verdict} ({assumed})"
    )
    return {"text": text, "needed": needed, "difference": difference, "level": level, "test": test}
