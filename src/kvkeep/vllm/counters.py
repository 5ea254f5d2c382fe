"""Numbers that cross processes: the scheduler and the workers count, the server's front end reads.

vLLM runs them in several processes and offers plug-ins no channel between them. Each writer has a small file of its
own, mapped into memory; counting is a store to memory. A reader sums over the files of its engine.
"""

from __future__ import annotations

import atexit
import os
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .manager import KeepManager
    from .timeline import Timeline

#: Names of the numbers, in the order of the file. What is counted up, and what is a state.
COUNTED = (
    "requests",
    "grown_budgets",
    "rounds",
    "evicted_entries",
    "round_seconds",
    "moved_entries",
)
STATES = ("blocks_in_use", "blocks_saved", "blocks_total")
NAMES = COUNTED + STATES


def folder() -> Path:
    """Where this user's processes leave their numbers."""
    return Path(tempfile.gettempdir()) / f"kvkeep-{os.getuid()}"


class Counters:
    """One process's numbers of one engine.

    Args:
        instance: vLLM's ``instance_id``, the same in all processes of an engine.
        role: what counts, unique among the engine's processes.
    """

    def __init__(self, instance: str, role: str) -> None:
        place = folder()
        place.mkdir(mode=0o700, exist_ok=True)
        _sweep(place)
        self.path = place / f"{instance}.{role}.{os.getpid()}.bin"
        self.path.write_bytes(bytes(8 * len(NAMES)))
        self._values = np.memmap(self.path, dtype=np.float64, mode="r+", shape=(len(NAMES),))
        atexit.register(self.path.unlink, missing_ok=True)

    def add(self, name: str, by: float) -> None:
        """Count up."""
        self._values[NAMES.index(name)] += by

    def set(self, name: str, value: float) -> None:
        """Note a state."""
        self._values[NAMES.index(name)] = value


def read(instance: str) -> dict[str, float]:
    """The numbers of an engine, summed over its processes; empty if none of them has counted yet."""
    files = sorted(folder().glob(f"{instance}.*.bin")) if folder().is_dir() else []
    parts = [np.fromfile(path, dtype=np.float64) for path in files]
    total = np.sum([p for p in parts if len(p) == len(NAMES)], axis=0)
    return dict(zip(NAMES, map(float, total), strict=True)) if parts else {}


def _sweep(place: Path) -> None:
    """Remove what processes left that were killed."""
    for path in place.glob("*.bin"):
        found = re.fullmatch(r".*\.(\d+)\.bin", path.name)
        if found and not Path(f"/proc/{found[1]}").exists() and Path("/proc").is_dir():
            path.unlink(missing_ok=True)


class SchedulerCounters:
    """What the block manager knows: how far each request is, and what it holds."""

    def __init__(self, manager: KeepManager, instance: str, role: str) -> None:
        self._manager = manager
        self._counters = Counters(instance, role)
        self._rounds: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._counters.set("blocks_total", manager.block_pool.num_gpu_blocks - 1)

    def begin(self, request_id: str, timeline: Timeline) -> None:
        """A request was admitted, or admitted again after a preemption."""
        self._rounds[request_id], self._tokens[request_id] = 0, 0
        self._counters.add("requests", 1)
        self._counters.add("grown_budgets", timeline.grown > 0)

    def progress(self, request_id: str, timeline: Timeline, tokens: int) -> None:
        """Its first ``tokens`` tokens have been computed."""
        self._tokens[request_id] = tokens
        before, now = self._rounds[request_id], timeline.rounds(tokens - 1) if tokens else 0
        if now > before:
            self._rounds[request_id] = now
            self._counters.add("rounds", now - before)
            self._counters.add("evicted_entries", timeline.evicted(now) - timeline.evicted(before))

    def end(self, request_id: str) -> None:
        """It ended or was preempted."""
        self._rounds.pop(request_id, None)
        self._tokens.pop(request_id, None)
        if not self._tokens:  # no step may follow that would publish it
            self.publish()

    def publish(self) -> None:
        """Note what requests hold now, and what they would hold with the full cache."""
        manager, size = self._manager, self._manager.block_size
        held = {r: len(blocks) for r, blocks in manager.req_to_blocks.items()}
        full = _blocks(self._tokens.values(), size)
        self._counters.set("blocks_in_use", sum(held.values()))
        # A request that just took blocks ahead of its tokens saves nothing yet.
        self._counters.set("blocks_saved", max(0, full - sum(held.get(r, 0) for r in self._tokens)))


def _blocks(tokens: Iterable[int], size: int) -> int:
    return sum(-(-n // size) for n in tokens)
