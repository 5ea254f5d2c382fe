"""Decoding speed once a text is n tokens long: full cache, bounded cache, and transformers' own cache.

Each arm fills its cache with the same n tokens, then all take turns: so many one-token steps each.
A bounded cache runs one round in every ``buffer`` steps and ends where it began; a full cache grows,
so it is filled to where its mean length over the timed turns is n.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..hf.cache import EvictCache
from ..hf.contract import CACHE_ARGUMENT
from ..settings import Settings
from .common import alternate, interval, load_model, median, place, progress, record, threads

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedModel

PROMPT = 64  # tokens
CHUNK = 512  # tokens of a forward while a cache is filled


class Runner:
    """A model with one cache.

    Args:
        model: shared by all runners; each gets a copy with the same weights, so that no runner pays
            for the hooks of another one's cache.
        settings: of a kvkeep cache; None takes transformers' ``DynamicCache``.
    """

    def __init__(self, model: PreTrainedModel, settings: Settings | None) -> None:
        shared = [*model.parameters(), *model.buffers()]
        self.model: PreTrainedModel = copy.deepcopy(model, {id(t): t for t in shared})
        self.cache = DynamicCache(config=model.config) if settings is None else settings.cache(self.model)
        self.next: Tensor  # [B, 1], ids of the next step

    def close(self) -> None:
        """Take a kvkeep cache off the model."""
        if isinstance(self.cache, EvictCache):
            self.cache.close()

    def _forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(
            input_ids=ids, logits_to_keep=1, use_cache=True, **{CACHE_ARGUMENT: self.cache}
        ).logits
        return logits

    def fill(self, ids: Tensor) -> None:
        """Cache the tokens ``ids`` [B, n]: a short prompt, then a forced trace, in chunks."""
        done = min(PROMPT, ids.shape[1])
        logits = self._forward(ids[:, :done])
        while done < ids.shape[1]:
            size = min(CHUNK, ids.shape[1] - done)
            if isinstance(self.cache, EvictCache):
                size = min(size, self.cache.trace_space() or size)
                with self.cache.as_trace():
                    logits = self._forward(ids[:, done : done + size])
            else:
                logits = self._forward(ids[:, done : done + size])
            done += size
        self.next = logits[:, -1].argmax(-1, keepdim=True)

    def steps(self, count: int) -> None:
        """Generate ``count`` tokens a row, greedily."""
        for _ in range(count):
            self.next = self._forward(self.next)[:, -1].argmax(-1, keepdim=True)

    @property
    def rounds(self) -> int:
        """Rounds that ran so far."""
        return int(self.cache.stats()["rounds"][0]) if isinstance(self.cache, EvictCache) else 0


def _settings(arm: str, budget: int, buffer: int, seed: int) -> Settings | None:
    if arm == "dynamic":
        return None
    return Settings.of(arm, seed=seed) if arm == "full" else Settings.of(arm, budget=budget, buffer=buffer, seed=seed)


def random_ids(model: PreTrainedModel, batch: int, length: int, seed: int) -> Tensor:
    """Random text, int64 [batch, length]."""
    some = torch.Generator().manual_seed(seed)
    vocabulary: int = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (batch, length), generator=some).to(model.device)


def _compare(times: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    """Tokens per second of each arm and ratios paired by turn, with 95% bootstrap intervals."""
    found: dict[str, Any] = {}
    for arm, spent in times.items():
        speeds = [tokens / ms * 1e3 for ms in spent]
        found[f"{arm}_tokens_per_s"] = median(speeds)
        found[f"{arm}_interval"] = interval(speeds)
    arms = list(times)
    for arm in arms:
        for base in ("full", "dynamic"):
            if arm != base and base in arms:
                ratios = [b / a for a, b in zip(times[arm], times[base], strict=True)]
                found[f"{arm}_over_{base}"] = median(ratios)
                found[f"{arm}_over_{base}_interval"] = interval(ratios)
    return found


def run(
    model: str | PreTrainedModel = "tiny",
    lengths: Sequence[int] = (512, 1024, 2048, 4096, 7900),
    budget: int = 512,
    buffer: int = 64,
    arms: Sequence[str] = ("full", "random", "dynamic"),
    *,
    batch: int = 1,
    alternations: int = 7,
    generate: int | None = None,
    dtype: str | None = None,
    device: str | None = None,
    seed: int = 0,
    torch_threads: int | None = None,
    show: bool = True,
) -> dict[str, Any]:
    """Time ``buffer`` one-token steps of each arm at each length, in turns.

    Args:
        model: ``tiny`` (random, made in code), ``smollm2``, a folder, a hub id, or a loaded model.
        lengths: tokens of text that the caches have seen.
        budget: K of the arms that evict.
        buffer: r of the arms that evict; also the timed steps of a turn, so that each has one round.
        arms: policies, and ``dynamic`` for transformers' own cache without kvkeep.
        batch: rows.
        alternations: timed turns, at least 5.
        generate: length of one whole generation in each arm; None means 4096 for ``tiny``, else none.
        dtype: of a model loaded by name; float32 on a CPU, else bfloat16.
        device: by default the GPU if there is one.
        seed: of the text and the draws.
        torch_threads: CPU threads of torch; None leaves them.
        show: progress bar on stderr.

    Returns:
        Environment and ``rows``. A row of kind "steps" has, for each arm, tokens per second (all rows of
        the batch together) and, for each ratio to ``full`` and to ``dynamic``, the median over turns;
        intervals are 95% bootstrap intervals of medians. ``random_rounds`` counts rounds in the timed steps.
    """
    if alternations < 5:
        raise ValueError(f"alternations must be at least 5, got {alternations}: an interval needs several turns")
    where = place(device) if isinstance(model, str) else model.device
    name = model if isinstance(model, str) else type(model).__name__
    weights = dtype or ("float32" if where.type == "cpu" else "bfloat16")
    if generate is None:
        generate = 4096 if name == "tiny" else 0
    rows: list[dict[str, Any]] = []
    with threads(torch_threads), torch.inference_mode():
        loaded = load_model(model, where, weights, seed) if isinstance(model, str) else model
        shared = {"model": name, "budget": budget, "buffer": buffer, "batch": batch}
        with progress("bench decode", len(lengths) + bool(generate), show) as step:
            for length in lengths:
                runners = {arm: Runner(loaded, _settings(arm, budget, buffer, seed)) for arm in arms}
                # One turn of warm-up and the timed ones: their middle is at `length`, and half way between rounds.
                before = length - buffer - alternations * buffer // 2
                before = max(PROMPT + buffer // 2, before // buffer * buffer + buffer // 2)
                ids = random_ids(loaded, batch, before, seed)
                for runner in runners.values():
                    runner.fill(ids)
                begun: dict[str, int] = {}

                def count(turn: int, begun: dict[str, int] = begun, runners: dict[str, Runner] = runners) -> None:
                    if turn == 1:  # turn 0 warms up
                        begun.update((arm, runner.rounds) for arm, runner in runners.items())

                times = alternate(
                    {arm: lambda r=runner: r.steps(buffer) for arm, runner in runners.items()},  # type: ignore[misc]
                    alternations,
                    where,
                    warm_up=1,
                    before=count,
                    shuffled=True,
                )
                row: dict[str, Any] = {"kind": "steps", "length": length, **shared, "steps": buffer}
                row |= {"alternations": alternations, **_compare(times, buffer * batch)}
                row |= {f"{arm}_rounds": runner.rounds - begun[arm] for arm, runner in runners.items()}
                rows.append(row)
                for runner in runners.values():
                    runner.close()
                step(f"{length} tokens")
            if generate:
                runners = {arm: Runner(loaded, _settings(arm, budget, buffer, seed)) for arm in arms}
                for runner in runners.values():
                    runner.fill(random_ids(loaded, batch, PROMPT, seed))
                # In turns of some rounds each, so that all arms meet the same noise; a turn's times add up.
                parts = alternate(
                    {arm: lambda r=runner: r.steps(4 * buffer) for arm, runner in runners.items()},  # type: ignore[misc]
                    max(1, generate // (4 * buffer)),
                    where,
                    warm_up=0,
                    shuffled=True,
                )
                row = {"kind": "generation", "length": generate, **shared}
                row |= _compare({arm: [sum(spent)] for arm, spent in parts.items()}, generate * batch)
                row |= {f"{arm}_rounds": runner.rounds for arm, runner in runners.items()}
                rows.append(row)
                for runner in runners.values():
                    runner.close()
                step(f"a generation of {generate} tokens")
        return record(rows, where, seed)


def table(result: dict[str, Any]) -> Table:
    """The rows as a table; ``--json`` has all numbers."""
    from ..report.tables import table as make

    rows = result["rows"]
    suffix = "_tokens_per_s"
    arms = [key.removesuffix(suffix) for key in rows[0] if key.endswith(suffix)]
    ratios = [key for key in rows[0] if "_over_" in key and key.partition("_")[0] not in ("full", "dynamic")]
    ratios = [key for key in ratios if not key.endswith("_interval")]

    def ratio(row: dict[str, Any], key: str) -> str:
        low, high = row[f"{key}_interval"]
        return f"{row[key]:.2f} [{low:.2f},{high:.2f}]" if low < high else f"{row[key]:.2f}"

    first = rows[0]
    return make(
        f"Decoding, tokens/s: {first['model']}, K={first['budget']}, r={first['buffer']}, batch {first['batch']} "
        f"({result['device']}, {result['threads']} threads)",
        ["kind", "length", *arms, *(key.replace("_over_", "\n/") for key in ratios)],
        [
            (
                row["kind"],
                row["length"],
                *(f"{row[arm + suffix]:.0f}" for arm in arms),
                *(ratio(row, r) for r in ratios),
            )
            for row in rows
        ],
        caption="ratios: median over turns, 95% bootstrap interval; dynamic is transformers' own cache",
    )
