"""What every benchmark needs: fair timing, intervals, the environment, and models made in code."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..report.files import versions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Arm = Callable[[], object]


def stopwatch(device: torch.device) -> Callable[[Arm], float]:
    """A function that runs an arm and returns its time in ms: CUDA events on a GPU, else a wall clock.

    The GPU is idle when an arm starts, so an arm of small kernels shows what launching them costs.
    """
    if device.type != "cuda":

        def wall(arm: Arm) -> float:
            start = time.perf_counter()
            arm()
            return (time.perf_counter() - start) * 1e3

        return wall
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def events(arm: Arm) -> float:
        torch.cuda.synchronize(device)
        first.record()
        arm()
        last.record()
        torch.cuda.synchronize(device)
        return float(first.elapsed_time(last))

    return events


def alternate(
    arms: Mapping[str, Arm],
    repeats: int,
    device: torch.device,
    warm_up: int = 2,
    before: Callable[[int], None] | None = None,
    shuffled: bool = False,
) -> dict[str, list[float]]:
    """Times in ms of arms that take turns, so that whatever else the machine does hits all alike.

    Args:
        arms: what to time, in the order of a turn.
        repeats: timed turns.
        device: where the work runs.
        warm_up: turns before the timed ones.
        before: called before each turn with its number, untimed.
        shuffled: start each turn with another arm; only for arms that do not build on each other.
    """
    clock, names = stopwatch(device), list(arms)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(warm_up + repeats):
        if before is not None:
            before(turn)
        shift = turn % len(names) if shuffled else 0
        for name in names[shift:] + names[:shift]:
            spent = clock(arms[name])
            if turn >= warm_up:
                times[name].append(spent)
    return times


def median(values: Sequence[float]) -> float:
    """The median."""
    return float(np.median(values))


def interval(values: Sequence[float], share: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap interval of the median."""
    data: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(len(data), size=(2000, len(data)))
    low, high = np.quantile(np.median(data[drawn], axis=1), [(1 - share) / 2, (1 + share) / 2])
    return float(low), float(high)


def place(device: str | torch.device | None) -> torch.device:
    """The device to run on; None takes the GPU if there is one."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """What the numbers belong to, in words."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    if device.type != "cpu":
        return device.type
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"cpu: {names[0]}" if names else "cpu"


def record(rows: list[dict[str, Any]], device: torch.device, seed: int, **more: Any) -> dict[str, Any]:
    """A result with its environment: versions, device, threads, seed, rows."""
    return {
        "versions": versions(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "seed": seed,
        **more,
        "rows": rows,
    }


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run with this many torch threads; None leaves the number as it is."""
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def progress(label: str, total: int, show: bool = True) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr; gives a function that completes one step and names the next."""
    if not show:
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda text: bar.update(task, advance=1, description=f"{label}: {text}")


def tiny_model(
    device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any
) -> PreTrainedModel:
    """A random Llama: 4 layers, width 256, 8 heads of which 4 are KV heads, 16,384 positions."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 1024,
        "max_position_embeddings": 16384,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**(shape | config)))
    return model.to(device=device, dtype=dtype).eval()


def load_model(name: str, device: torch.device, dtype: str, seed: int) -> PreTrainedModel:
    """``tiny`` (made in code), ``smollm2``, a folder or a hub id."""
    if name == "tiny":
        return tiny_model(device, getattr(torch, dtype), seed)
    from ..hf.load import load

    return load(name, dtype=dtype, device=str(device))[0]
