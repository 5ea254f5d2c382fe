"""``python -m kvkeep.bench.storms``, `make bench-storm`: storms of many requests on real vLLM, each time a new one."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ..report.files import check_writable, versions, write_json
from ..vllm import KEY, Serving
from .storm import Ask, Outcome, Tokens, alone, followers, storm, weather

out = Console()

VOCABULARY = 512
LONGEST = 768  # tokens of a request
PROMPTS, TRACES = (1, 200), (16, 240)
#: Blocks of 32 slots, one of them vLLM's own: what one request may need with the full cache, and hardly more.
POOL = 26


@dataclass(frozen=True)
class Weather:
    """One storm: what is asked of kvkeep (None: stock vLLM), and of vLLM."""

    keep: dict[str, Any] | None
    options: dict[str, Any] = field(default_factory=dict)


RANDOM: dict[str, Any] = {"policy": "random", "budget": 64, "buffer": 16}
STORMS = {
    "random": Weather(RANDOM),
    "random, reserve": Weather(RANDOM | {"admission": "reserve"}),
    "random, priority": Weather(RANDOM, {"scheduling_policy": "priority"}),
    "random, whole blocks": Weather(RANDOM | {"buffer": 32, "draw": "model", "unit": 32}),
    "streaming": Weather({"policy": "streaming", "budget": 64, "buffer": 16}),
    "stock": Weather(None),
}


def tiny_model(folder: Path) -> str:
    """A random Qwen3 of three layers, large enough in its weights that one wrong entry changes a greedy trace."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, num_hidden_layers=3, max_position_embeddings=4096, tie_word_embeddings=False,
        initializer_range=0.2, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@contextmanager
def engine(model: str, keep: dict[str, Any] | None, **options: Any) -> Iterator[Any]:
    """A vLLM engine in this process, in float32, stopped at the end."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    asked = {} if keep is None else {"additional_config": {KEY: keep}}
    llm = LLM(
        model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, block_size=32, max_num_seqs=16,
        max_model_len=LONGEST, disable_log_stats=True, seed=0, **asked, **options,
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()


def run(model: str, storm_: Weather, requests: int, seed: int) -> tuple[Outcome, list[Tokens], list[Ask]]:
    """One storm, and the traces of its requests alone on a roomy engine."""
    keep = None if storm_.keep is None else storm_.keep | {"seed": seed}
    turns = requests // 4
    asks = weather(requests - turns, seed, VOCABULARY, PROMPTS, TRACES)
    with engine(model, keep, enable_prefix_caching=False) as llm:
        expected = alone(llm, asks)
        later = followers(asks, expected, turns, seed, VOCABULARY)
        asks, expected = asks + later, expected + alone(llm, later)
    small = {"num_gpu_blocks_override": POOL, "max_num_batched_tokens": 48, **storm_.options}
    with engine(model, keep, **small) as llm:
        return storm(llm, asks, None if keep is None else Serving.parse(keep), seed), expected, asks


def main(
    requests: Annotated[int, typer.Option(min=8, help="Requests of each storm; a quarter are second turns.")] = 200,
    seed: Annotated[int | None, typer.Option(min=0, help="Of everything; default: a new one, printed.")] = None,
    storms: Annotated[str, typer.Option(help="Which, joined by semicolons; or all.")] = "all",
    json: Annotated[Path | None, typer.Option("--json", "--out", help="Also write the numbers to this file.")] = None,
) -> None:
    """Storms on a small pool: late joins, aborts, preemption by force and by starvation, second turns.

    Every trace must be the one the request has alone, and every block must come back; else the exit status is 1. Stock
    vLLM goes through the same storm beside it: its mismatches are shown and change nothing.
    """
    check_writable(json)
    names = list(STORMS) if storms == "all" else [name.strip() for name in storms.split(";")]
    unknown = [name for name in names if name not in STORMS]
    if unknown:
        raise typer.BadParameter(f"no storm {unknown[0]!r}; there are {'; '.join(STORMS)}")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # blocks are counted in the scheduler, which must be here
    seed = secrets.randbelow(2**31) if seed is None else seed
    out.print(f"seed {seed}: repeat with --seed {seed} --requests {requests}")
    rows, bad = [], False
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder))
        for name in names:
            begin = time.perf_counter()
            outcome, expected, asks = run(model, STORMS[name], requests, seed)
            wrong = outcome.mismatches(expected, asks)
            out.print(f"{name}: {len(wrong)} mismatches in {time.perf_counter() - begin:.0f} s")
            bad |= STORMS[name].keep is not None and bool(wrong or outcome.lost)
            rows.append(_row(name, outcome, wrong))
    out.print(_table(rows))
    if json is not None:
        write_json(json, {"command": "bench-storm", "seed": seed, "requests": requests, "storms": rows, **versions()})
    if bad:
        out.print(f"[red]a trace depended on the storm, or blocks were lost (seed {seed})[/red]")
        raise typer.Exit(1)


def _row(name: str, outcome: Outcome, wrong: dict[int, int]) -> dict[str, Any]:
    return {
        "storm": name,
        "requests": len(outcome.traces),
        "tokens": sum(map(len, outcome.traces)),
        "steps": outcome.steps,
        "at_once": outcome.peak,
        "preemptions": outcome.preemptions,
        "starved": outcome.starved,
        "forced": sum(outcome.forced.values()),
        "rounds_replayed": sum(outcome.replayed),
        "most_replayed": max(outcome.replayed, default=0),
        "aborted": outcome.aborted.total(),
        "cached_tokens": sum(outcome.hits.values()),
        "mismatches": len(wrong),
        "first_differences": wrong,
        "lost": outcome.lost,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    shown = {
        "storm": "storm", "at_once": "at once", "preemptions": "preempted", "starved": "for blocks",
        "most_replayed": "rounds replayed", "aborted": "aborted", "cached_tokens": "cached", "mismatches": "wrong",
    }  # fmt: skip
    table = Table(*shown.values(), "lost", title="Traces in a storm against traces alone")
    for row in rows:
        table.add_row(*[str(row[name]) for name in shown], "; ".join(row["lost"]) or "nothing")
    return table


if __name__ == "__main__":
    typer.run(main)
