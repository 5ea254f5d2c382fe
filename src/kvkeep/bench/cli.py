"""``kvkeep bench``: what a round, a step and a cache cost on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..report.files import check_writable, write_json

app = typer.Typer(no_args_is_help=True, help="Measure what eviction costs on this machine, and what it saves.")
out = Console()

JsonFile = Annotated[Path | None, typer.Option("--json", help="Also write the numbers to this file.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads of torch; default: torch's choice.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default: the GPU if there is one.")]
Seed = Annotated[int, typer.Option(help="Seed of the draws and of the made-up data.")]
Budget = Annotated[int, typer.Option(help="K: entries a KV head keeps.")]
Buffer = Annotated[int, typer.Option(help="r: tokens between two rounds.")]


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{option} takes whole numbers joined by commas, e.g. 512,2048; got {text!r}") from error


def _show(result: dict[str, Any], table: Any, json: Path | None) -> None:
    out.print(table)
    if json is not None:
        write_json(json, result)


@app.command("round")
def round_(
    budgets: Annotated[str, typer.Option("--budget", help="Budgets K, joined by commas.")] = "512,2048,8192",
    buffer: Buffer = 64,
    batches: Annotated[str, typer.Option("--batch", help="Batch sizes, joined by commas.")] = "1,16",
    policy: Annotated[str, typer.Option(help="Policies, joined by commas, or all.")] = "random",
    layers: Annotated[int, typer.Option(min=1)] = 4,
    heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    device: Device = None,
    seed: Seed = 0,
    threads: Threads = None,
    json: JsonFile = None,
) -> None:
    """Cost of one round: draw, plan and moves apart, against gathering the K kept entries, beside a memcpy."""
    check_writable(json)
    from ..policies import policies as known
    from ..signals import POSITIONS
    from . import round as bench

    names = (
        [p.name for p in known().values() if p.evicts and p.signals <= {POSITIONS}]
        if policy == "all"
        else policy.split(",")
    )
    result = bench.run(
        _numbers(budgets, "--budget"), buffer, _numbers(batches, "--batch"), names, layers=layers, heads=heads,
        head_dim=head_dim, dtype=dtype, device=device, seed=seed, torch_threads=threads,
    )  # fmt: skip
    _show(result, bench.table(result), json)


@app.command()
def decode(
    model: Annotated[str, typer.Option(help="tiny (random weights), smollm2, hub id or local folder.")] = "tiny",
    lengths: Annotated[str, typer.Option(help="Tokens seen before the timed steps, joined by commas.")] = (
        "512,1024,2048,4096,7900"
    ),
    budget: Budget = 512,
    buffer: Buffer = 64,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    alternations: Annotated[int, typer.Option(min=5, help="How often the arms take turns.")] = 7,
    generate: Annotated[
        int | None, typer.Option(help="Also time one whole generation of this many tokens; default 4096 for tiny.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Default: float32 on CPU.")] = None,
    device: Device = None,
    seed: Seed = 0,
    threads: Threads = None,
    json: JsonFile = None,
) -> None:
    """Tokens a second with the full cache, a bounded one and transformers' own, after the same text."""
    check_writable(json)
    from . import decode as bench

    result = bench.run(
        model, _numbers(lengths, "--lengths"), budget, buffer, batch=batch, alternations=alternations,
        generate=generate, dtype=dtype, device=device, seed=seed, torch_threads=threads,
    )  # fmt: skip
    _show(result, bench.table(result), json)


@app.command()
def memory(
    model: Annotated[str, typer.Option(help="tiny (random weights), smollm2, hub id or local folder.")] = "tiny",
    tokens: Annotated[int, typer.Option(min=1, help="Length of the text.")] = 4096,
    limit: Annotated[float, typer.Option(help="Bytes a batch's cache may take, in MiB.")] = 512,
    budget: Budget = 512,
    buffer: Buffer = 64,
    dtype: Annotated[str | None, typer.Option(help="Default: float32 on CPU.")] = None,
    device: Device = None,
    seed: Seed = 0,
    threads: Threads = None,
    json: JsonFile = None,
) -> None:
    """Bytes by part, mean and peak, and the largest batch that fits under a limit."""
    check_writable(json)
    from . import memory as bench

    if not limit > 0:
        raise ValueError(f"--limit must be more than 0 MiB, got {limit}")
    result = bench.run(
        model, tokens, int(limit * 2**20), budget, buffer, dtype=dtype, device=device, seed=seed, torch_threads=threads
    )
    _show(result, bench.table(result), json)
