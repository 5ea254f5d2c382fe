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
    budgets: Annotated[
        str | None,
        typer.Option("--budget", help="Budgets K, joined by commas; default: 512,2048,8192, comparing policies 2048."),
    ] = None,
    buffer: Buffer = 64,
    batches: Annotated[
        str | None, typer.Option("--batch", help="Batch sizes, joined by commas; default: 1,16, comparing policies 1.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="One policy; or several, NAME:option=value,... joined by commas; or all.")
    ] = "random",
    layers: Annotated[int, typer.Option(min=1)] = 4,
    heads: Annotated[int, typer.Option(min=1, help="KV heads.")] = 8,
    query_heads: Annotated[
        int | None, typer.Option(min=1, help="Query heads, comparing policies; default: 4 a KV head.")
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    turns: Annotated[int, typer.Option(min=1, help="Timed turns, comparing policies.")] = 9,
    observe: Annotated[
        bool, typer.Option(help="Comparing policies, also time the collecting of signals between rounds.")
    ] = True,
    device: Device = None,
    seed: Seed = 0,
    threads: Threads = None,
    json: Annotated[Path | None, typer.Option("--json", "--out", help="Also write the numbers to this file.")] = None,
) -> None:
    """Cost of one round.

    Of a policy such as random: draw, plan and moves apart, against gathering the K kept entries, beside a memcpy. Of
    several policies, or of one that looks at keys or queries: the whole round, what it has to see between rounds and
    its extra memory, relative to random.
    """
    check_writable(json)
    from ..policies import make_policy
    from ..signals import POSITIONS
    from . import policies as comparison
    from . import round as bench

    names = comparison.names(policy)
    common: dict[str, Any] = {"layers": layers, "heads": heads, "head_dim": head_dim, "dtype": dtype}
    common |= {"device": device, "seed": seed, "torch_threads": threads}
    if len(names) == 1 and ":" not in names[0] and make_policy(names[0]).signals <= {POSITIONS}:
        many, rows = _numbers(budgets or "512,2048,8192", "--budget"), _numbers(batches or "1,16", "--batch")
        result = bench.run(many, buffer, rows, names, **common)
        _show(result, bench.table(result), json)
        return
    common |= {"query_heads": query_heads or 4 * heads, "turns": turns, "observe": observe}
    many, rows = _numbers(budgets or "2048", "--budget"), _numbers(batches or "1", "--batch")
    result = comparison.run(names, many, buffer, rows, **common)
    _show(result, comparison.table(result), json)


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
def serve(
    model: Annotated[str, typer.Option(help="tiny (random weights), smollm2, hub id or local folder.")] = "tiny",
    lengths: Annotated[str, typer.Option(help="Tokens that each request generates, joined by commas.")] = (
        "256,1024,4096,8192"
    ),
    regimes: Annotated[
        str, typer.Option(help="fixed (the full cache has room for all requests), full (for few of them), or both.")
    ] = "fixed,full",
    arms: Annotated[
        str,
        typer.Option(help="Joined by commas: stock, random, blocks, streaming, gather, one-by-one, reserve; or all."),
    ] = "stock,random,blocks,streaming",
    repeats: Annotated[int, typer.Option(min=1, help="How often the arms take turns.")] = 5,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 64,
    budget: Budget = 512,
    buffer: Buffer = 64,
    block_size: Annotated[int, typer.Option(min=1, help="Slots of a block, in all arms.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Pool fixed: requests that run together.")] = 8,
    fit: Annotated[int, typer.Option(min=1, help="Pool full: requests that fit with the full cache.")] = 2,
    requests: Annotated[int, typer.Option(min=1, help="Pool full: requests submitted at once.")] = 12,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, ...")] = "float32",
    seed: Seed = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of the kernels.")] = 1,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="256 tokens, and 1024 in a full pool, K=256: about three minutes."),
    ] = False,
    json: Annotated[
        Path | None,
        typer.Option("--json", help="Also write the numbers to this file, run by run; the same command continues it."),
    ] = None,
) -> None:
    """Throughput of a vLLM server on this machine's CPU: vLLM as it comes, random, and other arms, in turns.

    Each arm has an engine of its own; all are in memory at once, and one works at a time.
    """
    check_writable(json)
    from . import serve as bench
    from .serve_tables import floor_lines, tables

    options = bench.Options(
        model=model, prompt=prompt, budget=budget, buffer=buffer, block_size=block_size, concurrency=concurrency,
        fit=fit, requests=requests, dtype=dtype, threads=threads, seed=seed,
    )  # fmt: skip
    names = list(bench.ARMS) if arms == "all" else [name.strip() for name in arms.split(",")]
    cells = [(regime.strip(), n) for regime in regimes.split(",") for n in _numbers(lengths, "--lengths")]
    plan: dict[str, Any] = {"cells": cells, "arms": names, "repeats": repeats}
    if quick:
        options, plan = bench.quick(options)
    result = bench.run(options, json_file=json, **plan)
    _show(result, tables(result), json)
    for line in floor_lines(result):
        out.print(line)


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
