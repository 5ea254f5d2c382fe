"""``kvkeep testbed``: problems, checkpoints, training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..report.files import check_writable, write_json
from ..report.tables import table

app = typer.Typer(no_args_is_help=True, help="Abacus: a tiny reasoning model, its problems and its training.")
out, err = Console(), Console(stderr=True)


@app.command()
def show(
    n: Annotated[int, typer.Option(help="Program lines.")] = 6,
    mode: Annotated[str, typer.Option(help="Restate mode: r0, r8, r4, r2 or r1.")] = "r2",
    distractors: Annotated[int, typer.Option(help="Lines nobody uses.")] = 0,
    note_after: Annotated[int | None, typer.Option(help="Plant a passcode after this step.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the problem set.")] = 0,
    index: Annotated[int, typer.Option(help="Number in the set.")] = 0,
) -> None:
    """Print one problem and its ideal trace."""
    from .tasks import Spec, make_problem

    questions = () if note_after is None else ("passcode",)
    problem = make_problem(Spec(n, mode, distractors, note_after, questions), seed, index)
    out.print(f"[bold]prompt[/bold]\n{problem.prompt}\n\n[bold]ideal trace[/bold]\n{problem.trace}", highlight=False)


@app.command()
def models(
    json: Annotated[Path | None, typer.Option("--json", help="Also write the table to this file.")] = None,
) -> None:
    """List the checkpoints that ship with kvkeep."""
    from .checkpoints import CAVEATS, DEFAULT, RECIPES, folder

    check_writable(json)
    rows = []
    for name, recipe in RECIPES.items():
        there = (path := folder(name)) is not None and (path / "model.safetensors").is_file()
        shown = f"{name} (abacus)" if name == DEFAULT else name
        rows.append((shown, recipe.dropout, recipe.steps, "yes" if there else "no", CAVEATS[name]))
    columns = ["name", "dropout", "steps", "here", "what to know"]
    out.print(table("Checkpoints", columns, rows))
    if json is not None:
        write_json(json, {"rows": [dict(zip(columns, row, strict=True)) for row in rows]})


@app.command()
def train(
    name: Annotated[str, typer.Argument(help="Checkpoint to make: abacus-base, abacus-attention, ...")],
    folder: Annotated[Path, typer.Option("--out", help="Folder for state, log and model; resumes what is there.")],
    seed: Annotated[int | None, typer.Option(help="Another seed than the recipe's.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Another number of steps than the recipe's.")] = None,
    start: Annotated[str | None, typer.Option(help="Stage 2 begins from this model, not the shipped base.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads; one is usually fastest.")] = 1,
) -> None:
    """Train a checkpoint from its seed. Interrupt it when you like: the same command goes on."""
    import torch

    from .checkpoints import RECIPES
    from .export import export
    from .train import Trainer

    if name not in RECIPES:
        raise ValueError(f"there is no checkpoint {name!r}: known are {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    changes: dict[str, Any] = {"seed": seed, "steps": steps, "start": start}
    recipe = replace(recipe, **{key: value for key, value in changes.items() if value is not None})
    torch.set_num_threads(threads)
    trainer = Trainer(recipe, folder)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err) as bar:
        task = bar.add_task(name, total=recipe.steps, completed=trainer.progress.step)
        trainer.run(report=lambda p: bar.update(task, completed=p.step, description=_state(name, p)))
    export(trainer.model, recipe, trainer.progress, folder / "model")
    out.print(f"model: {folder / 'model'}   log: {folder / 'log.jsonl'}", highlight=False)


def _state(name: str, progress: object) -> str:
    from .train import Progress as State

    assert isinstance(progress, State)
    lookup = progress.accuracy.get("LOOKUP", 0.0)
    return f"{name}: level {progress.level}, loss {progress.loss:.3f}, lookup {lookup:.2f}"
