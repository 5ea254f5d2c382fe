"""Bytes of a cache, measured on its tensors over a generation, and how many rows fit under a limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..hf.cache import EvictCache
from ..settings import Settings
from .common import load_model, place, progress, record, threads
from .decode import PROMPT, Runner, random_ids

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedModel

PARTS = ("entries", "positions", "policy")


def _generate(
    model: PreTrainedModel,
    settings: Settings,
    batch: int,
    tokens: int,
    prompt: int,
    seed: int,
    tick: Callable[[], None],
) -> dict[str, float]:
    """Mean and peak bytes over a generation of ``tokens``, looked at after every token."""
    runner = Runner(model, settings)
    assert isinstance(runner.cache, EvictCache)
    try:
        runner.fill(random_ids(model, batch, prompt, seed))
        seen: list[dict[str, int]] = []
        for number in range(tokens):
            runner.steps(1)
            seen.append(dict(runner.cache.stats()["bytes"]))
            if number % 64 == 63:
                tick()
        top = max(seen, key=lambda sample: sample["now"])
        found: dict[str, float] = {f"{part}_bytes": top[part] for part in PARTS}
        found |= {"mean_bytes": sum(s["now"] for s in seen) / len(seen), "peak_bytes": top["now"]}
        found |= {"last_bytes": seen[-1]["now"], "rounds": runner.rounds}
        return found
    finally:
        runner.close()


def run(
    model: str | PreTrainedModel = "tiny",
    tokens: int = 4096,
    limit: int = 512 * 2**20,
    budget: int = 512,
    buffer: int = 64,
    policies: Sequence[str] = ("full", "random", "streaming"),
    *,
    prompt: int = PROMPT,
    dtype: str | None = None,
    device: str | None = None,
    seed: int = 0,
    torch_threads: int | None = None,
    show: bool = True,
) -> dict[str, Any]:
    """Measure each policy's cache over a generation, and extrapolate the largest batch under a limit.

    Args:
        model: ``tiny`` (random, made in code), ``smollm2``, a folder, a hub id, or a loaded model.
        tokens: length of the generation, beside the prompt.
        limit: bytes the cache of all rows may take.
        budget: K of the policies that evict.
        buffer: r of the policies that evict.
        policies: short names.
        prompt: tokens of the prompt.
        dtype: of a model loaded by name; float32 on a CPU, else bfloat16.
        device: by default the GPU if there is one.
        seed: of the text and the draws.
        torch_threads: CPU threads of torch; None leaves them.
        show: progress bar on stderr.

    Returns:
        Environment and ``rows``, sizes in bytes and for batch 1. ``entries_bytes``, ``positions_bytes`` and
        ``policy_bytes`` are the parts of ``peak_bytes``. ``row_bytes`` is what a second row adds to the peak,
        measured at batch 2; ``largest_batch_extrapolated`` goes on from there, linearly, up to ``limit``.
        Storage that grows is copied once each time; both copies of one tensor exist for that moment, and the
        peak, which is looked at after each token, does not count it.
    """
    where = place(device) if isinstance(model, str) else model.device
    name = model if isinstance(model, str) else type(model).__name__
    weights = dtype or ("float32" if where.type == "cpu" else "bfloat16")
    rows: list[dict[str, Any]] = []
    with threads(torch_threads), torch.inference_mode():
        loaded = load_model(model, where, weights, seed) if isinstance(model, str) else model
        with progress("bench memory", 2 * len(policies) * (tokens // 64), show) as step:
            for policy in policies:
                settings = Settings.of(policy, budget=budget, buffer=buffer, seed=seed)

                def tick(policy: str = policy) -> None:
                    step(policy)

                one, two = (_generate(loaded, settings, batch, tokens, prompt, seed, tick) for batch in (1, 2))
                added = two["peak_bytes"] - one["peak_bytes"]
                fixed = one["peak_bytes"] - added
                row: dict[str, Any] = {"model": name, "policy": policy, "budget": budget, "buffer": buffer}
                row |= {"prompt": prompt, "tokens": tokens, **one, "batch_2_peak_bytes": two["peak_bytes"]}
                row |= {"row_bytes": added, "limit_bytes": limit}
                row["largest_batch_extrapolated"] = max(0, int((limit - fixed) // added))
                rows.append(row)
        return record(rows, where, seed)


def table(result: dict[str, Any]) -> Table:
    """The rows as a table; ``--json`` has all numbers."""
    from ..report.tables import table as make

    keys = ("entries_bytes", "positions_bytes", "policy_bytes", "mean_bytes", "peak_bytes")
    limit = result["rows"][0]["limit_bytes"] / 2**20 if result["rows"] else 0
    return make(
        f"Cache memory, MiB, batch 1 ({result['device']})",
        ["policy", "model", "tokens", "entries", "positions", "policy state", "mean", "peak", "largest batch"],
        [
            (row["policy"], row["model"], row["tokens"], *(f"{row[key] / 2**20:.2f}" for key in keys),
             row["largest_batch_extrapolated"])
            for row in result["rows"]
        ],
        caption=f"largest batch: rows under {limit:.0f} MiB, extrapolated from batches 1 and 2",
    )  # fmt: skip
