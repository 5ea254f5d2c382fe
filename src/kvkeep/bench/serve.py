"""Throughput of a vLLM server with and without bounded caches: ``kvkeep bench serve``.

A cell is a regime and an output length. Each arm gets an engine of its own there, all the same but for kvkeep's
configuration, and arms take turns: A B C, B C A, ... Requests of a turn are the same for all arms and new in each turn,
so that no prompt is found in the prefix cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..evals.environment import code_sha256
from ..report.files import versions, write_json
from ..vllm import KEY
from ..vllm.versions import installed
from .common import device_name, place, progress, record, tiny_model
from .serve_engine import Engine
from .serve_tables import floors, summary

#: What an arm asks of kvkeep beside budget, buffer and seed; None is vLLM as it comes.
ARMS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "random": {"policy": "random"},
    "blocks": {"policy": "random", "draw": "model"},  # with the block size as unit: rounds edit the block table
    "streaming": {"policy": "streaming"},
    "gather": {"policy": "random", "moving": "gather"},
    "one-by-one": {"policy": "random", "one_by_one": True},
    "reserve": {"policy": "random", "admission": "reserve"},
}
MAIN = ("stock", "random", "blocks", "streaming")
REGIMES = ("fixed", "full")
WARM_UP = 4  # requests

Cell = tuple[str, int]  # regime, output length
Run = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """What a measurement is about.

    Attributes:
        model: ``tiny`` (random weights, made in code), ``smollm2``, a local folder or a hub id.
        prompt: tokens of each prompt.
        budget: K.
        buffer: r.
        block_size: slots of a block, for all arms.
        concurrency: regime "fixed": requests that run together, in a pool that holds all of them with the full cache.
        fit: regime "full": requests of the cell's length that the pool holds with the full cache.
        requests: regime "full": requests that are submitted at once.
        dtype: of weights and cache.
        threads: of the kernels.
        seed: of prompts, draws and a tiny model's weights.
    """

    model: str = "tiny"
    prompt: int = 64
    budget: int = 512
    buffer: int = 64
    block_size: int = 64
    concurrency: int = 8
    fit: int = 2
    requests: int = 12
    dtype: str = "float32"
    threads: int = 1
    seed: int = 0

    def blocks(self, length: int) -> int:
        """Blocks of a request with the full cache."""
        return -(-(self.prompt + length) // self.block_size)

    def pool(self, regime: str, length: int) -> int:
        """Blocks that requests can have."""
        return self.blocks(length) * (self.concurrency if regime == "fixed" else self.fit)

    def together(self, regime: str) -> int:
        """Requests of a turn."""
        return self.concurrency if regime == "fixed" else self.requests

    def keep(self, arm: str) -> dict[str, Any] | None:
        """kvkeep's configuration in an arm."""
        values = ARMS[arm]
        if values is None:
            return None
        made = {**values, "budget": self.budget, "buffer": self.buffer, "seed": self.seed}
        return made | ({"unit": self.block_size} if arm == "blocks" else {})


def run(
    options: Options,
    cells: Sequence[Cell],
    arms: Sequence[str] = MAIN,
    repeats: int = 5,
    *,
    json_file: Path | None = None,
    show: bool = True,
    start: Callable[[Options, Cell, str], Engine] | None = None,
) -> dict[str, Any]:
    """Measure all cells.

    Args:
        options: what it is about.
        cells: regimes, "fixed" (as many requests as the full cache has room for) or "full" (more than that), with the
            number of tokens that each request generates.
        arms: names in :data:`ARMS`.
        repeats: timed turns.
        json_file: rewritten after every run. Turns that it holds of the same settings are not measured again.
        show: progress bar on stderr.
        start: makes an arm's engine; by default a vLLM engine in a process of its own.

    Returns:
        Environment, settings, ``runs`` (one an arm and turn, see :func:`.serve_engine.measured`), ``rows`` (one an arm
        and cell, see :func:`.serve_tables.summary`) and ``floors``.

    Raises:
        ValueError: unknown names, numbers that cannot work, or a file of other settings.
        RuntimeError: an engine died; the message has the end of its log.
    """
    _check(options, cells, arms, repeats)
    if start is None:
        installed()
    runs = _stored(json_file, options)
    todo = {cell: turns for cell in cells if (turns := list(_todo(cell, arms, repeats, runs)))}
    again = {(*cell, *one) for cell, turns in todo.items() for one in turns}
    runs = [r for r in runs if _key(r) not in again]
    wanted = {(*cell, arm, turn) for cell in cells for arm in arms for turn in range(repeats)}
    environment: dict[str, Any] = {}

    def result() -> dict[str, Any]:
        rows = summary([r for r in runs if _key(r) in wanted])
        about = {"settings": asdict(options), "code": code_sha256(), "cpus": os.cpu_count(), **environment}
        return {**record(rows, place("cpu"), options.seed, **about), "threads": options.threads,
                "floors": floors(rows), "runs": runs}  # fmt: skip

    total = sum(map(len, todo.values()))
    with progress("bench serve", total, show) as step, tempfile.TemporaryDirectory() as logs:
        for cell, turns in todo.items():
            for done in _measure(options, cell, turns, start or _starter(Path(logs))):
                environment["vllm"] = done["vllm"]
                runs.append(done)
                if json_file is not None:
                    write_json(json_file, result())
                step(f"{cell[0]} pool, {cell[1]} tokens, {done['arm']}")
    if runs and "vllm" not in environment:
        environment["vllm"] = runs[-1]["vllm"]
    return result()


def quick(options: Options) -> tuple[Options, dict[str, Any]]:
    """Settings and arguments of :func:`run` that take about three minutes on two cores."""
    small = replace(options, budget=256, buffer=64)
    return small, {"cells": [("fixed", 256), ("full", 1024)], "arms": MAIN, "repeats": 3}


def _measure(
    options: Options, cell: Cell, turns: Sequence[tuple[str, int]], start: Callable[[Options, Cell, str], Engine]
) -> Iterator[Run]:
    regime, length = cell
    rounds = min(length, options.budget + options.buffer + 16)  # warm-up: also the code of rounds, if any will run
    with ExitStack() as open_engines:
        engines: dict[str, Engine] = {}
        for arm in sorted({arm for arm, _ in turns}):
            engines[arm] = start(options, cell, arm)
            open_engines.callback(engines[arm].close)
        about = {arm: engine.ready() for arm, engine in engines.items()}
        vocabulary = min(facts["vocabulary"] for facts in about.values())
        for engine in engines.values():
            engine.run(prompts(options, cell, -1, WARM_UP, vocabulary), rounds)
        for arm, turn in turns:
            given = prompts(options, cell, turn, options.together(regime), vocabulary)
            found = engines[arm].run(given, length)
            facts = {"pool": about[arm]["blocks"], **{k: about[arm][k] for k in ("concurrency", "vllm")}}
            yield {"regime": regime, "length": length, "arm": arm, "turn": turn, **facts, **found}


def prompts(options: Options, cell: Cell, turn: int, count: int, vocabulary: int) -> list[list[int]]:
    """The prompts of a turn: random, and the same in all arms."""
    text = json.dumps([options.seed, *cell, turn])
    numbers = np.random.default_rng(list(hashlib.sha256(text.encode()).digest()))
    made: list[list[int]] = numbers.integers(3, vocabulary, size=(count, options.prompt)).tolist()
    return made


def _todo(cell: Cell, arms: Sequence[str], repeats: int, runs: Sequence[Run]) -> Iterator[tuple[str, int]]:
    """(arm, turn) in the order they run: each turn starts with another arm.

    A turn that lacks an arm is measured again as a whole: arms are compared within a turn, side by side in time.
    """
    known = {_key(r) for r in runs}
    for turn in range(repeats):
        if any((*cell, arm, turn) not in known for arm in arms):
            shift = turn % len(arms)
            yield from ((arm, turn) for arm in (*arms[shift:], *arms[:shift]))


# ---- engines ------------------------------------------------------------------------------------------


def _starter(logs: Path) -> Callable[[Options, Cell, str], Engine]:
    def start(options: Options, cell: Cell, arm: str) -> Engine:
        regime, length = cell
        pool, keep = options.pool(regime, length), options.keep(arm)
        folder = model_folder(options)
        values: dict[str, Any] = {
            "model": folder, "skip_tokenizer_init": True, "dtype": options.dtype, "seed": 0, "enforce_eager": True,
            "max_model_len": options.prompt + length, "block_size": options.block_size,
            "num_gpu_blocks_override": pool + 1,  # one is vLLM's null block
            "max_num_seqs": options.together(regime), "disable_log_stats": True,
        }  # fmt: skip
        if keep is not None:
            values["additional_config"] = {KEY: keep}
        space = -(-pool * options.block_size * _entry_bytes(folder, options.dtype) // 2**30) + 1
        return Engine(values, options.threads, space, logs / f"{regime}-{length}-{arm}.log")

    return start


def model_folder(options: Options) -> str:
    """What vLLM loads; a tiny model is made once a machine."""
    if options.model != "tiny":
        from ..hf.load import locate

        return locate(options.model)[0]
    import torch
    import transformers
    from filelock import FileLock

    name = f"kvkeep-bench-serve-{options.seed}-{transformers.__version__}"
    folder = Path(tempfile.gettempdir()) / name
    with FileLock(f"{folder}.lock"):
        if not (folder / "model.safetensors").exists():
            shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1 << 15}
            tiny_model(torch.device("cpu"), torch.float32, options.seed, **shape).save_pretrained(folder)
    return str(folder)


def _entry_bytes(folder: str, dtype: str) -> int:
    """Bytes of one token in the full cache."""
    import torch
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(folder).get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    size: int = 2 * text.num_hidden_layers * text.num_key_value_heads * head * getattr(torch, dtype).itemsize
    return size


# ---- checks, and what was measured before ---------------------------------------------------------------


def _check(options: Options, cells: Sequence[Cell], arms: Sequence[str], repeats: int) -> None:
    regimes = list(dict.fromkeys(regime for regime, _ in cells))
    for what, given, known in (("arms", arms, tuple(ARMS)), ("regimes", regimes, REGIMES)):
        if not given or not set(given) <= set(known) or len(set(given)) < len(given):
            raise ValueError(f"{what} must be some of {', '.join(known)}, each once; got {', '.join(given) or 'none'}")
    if min(length for _, length in cells) < 1:
        raise ValueError(f"lengths must be positive, got {[length for _, length in cells]}")
    numbers = {"repeats": repeats, **{k: v for k, v in asdict(options).items() if isinstance(v, int) and k != "seed"}}
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    if "full" in regimes and options.requests <= options.fit:
        raise ValueError(
            f"a pool with room for {options.fit} requests is not full with {options.requests}: submit more requests"
        )


def _key(run: Run) -> tuple[str, int, str, int]:
    return run["regime"], run["length"], run["arm"], run["turn"]


def _stored(path: Path | None, options: Options) -> list[Run]:
    """Runs that a file holds, if they were measured under the same settings on the same machine."""
    if path is None or not path.exists():
        return []
    found = json.loads(path.read_text())
    now = {"settings": asdict(options), "code": code_sha256(), "device": device_name(place("cpu"))}
    now["versions"] = versions()
    for name, value in now.items():
        if found.get(name) != value:
            raise ValueError(f"{path} holds results with {name} {found.get(name)}, not {value}: name another file")
    runs: list[Run] = found["runs"]
    return runs
