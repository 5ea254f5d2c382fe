"""What the scheduler's process counts: how far each request is, and what it holds."""

from __future__ import annotations

import logging
import os
import time
import weakref
from typing import TYPE_CHECKING

from vllm import envs

from .counters import Counters, read
from .prometheus import Pushed
from .timeline import Timeline

if TYPE_CHECKING:
    from .manager import KeepManager

logger = logging.getLogger("vllm.kvkeep")

#: Pools whose requests are counted already: with several groups of evicting layers, one manager counts for all.
_counted: weakref.WeakSet[object] = weakref.WeakSet()
_PUSH_EVERY = 1.0  # seconds
_PUBLISH_EVERY = 0.1  # seconds


class Progress:
    """Numbers of one block manager.

    Args:
        manager: whose requests these are.
        engine: text of a :class:`~kvkeep.vllm.counters.Engine`.
        role: see :class:`~kvkeep.vllm.counters.Counters`.
    """

    def __init__(self, manager: KeepManager, engine: str, role: str) -> None:
        self._manager = weakref.proxy(manager)
        self._counters = Counters(engine, role)
        self._tokens: dict[str, int] = {}
        #: Whether this manager counts (and speaks) for the engine: the first of its groups of evicting layers.
        self.first = manager.block_pool not in _counted
        _counted.add(manager.block_pool)
        if self.first:
            self._counters.set("blocks_in_pool", manager.block_pool.num_gpu_blocks - 1)
        # With several API servers, /metrics shows what processes leave in this folder, and no collector's numbers.
        several = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        self._pushed = Pushed(self._counters.engine) if self.first and several else None
        self._last_push = self._last_line = self._published = 0.0
        self._rounds, self._said = 0, 0

    def scheduled(self, request_id: str, timeline: Timeline, tokens: int) -> None:
        """After this step, ``tokens`` tokens of the request have been computed."""
        before = self._tokens.get(request_id)
        self._tokens[request_id] = tokens
        if not self.first:
            return
        if before is None:
            self._counters.add("requests", 1)
            self._counters.add("grown_budgets", timeline.grown > 0)
        if tokens <= timeline.first:
            return
        ran, run = (timeline.rounds(n - 1) if n else 0 for n in (before or 0, tokens))
        if run > ran:
            self._rounds += run - ran
            self._counters.add("rounds", run - ran)
            self._counters.add("evicted_entries", timeline.evicted(run) - timeline.evicted(ran))

    def end(self, request_id: str) -> None:
        """It ended or was preempted."""
        self._tokens.pop(request_id, None)
        if not self._tokens:  # no step may follow that would publish it
            self.publish()

    def publish(self) -> None:
        """Note what requests hold now, and what they would hold with the full cache."""
        now = time.monotonic()
        if self._tokens and now - self._published < _PUBLISH_EVERY:
            return
        self._published = now
        size, blocks = self._manager.block_size, self._manager.req_to_blocks
        held = sum(map(len, blocks.values()))
        saved = sum(max(0, -(-n // size) - len(blocks.get(r, ()))) for r, n in self._tokens.items())
        self._counters.set("blocks_in_use", held)
        self._counters.set("blocks_saved", saved)
        if self.first:
            self._tell()

    def _tell(self) -> None:
        now = time.monotonic()
        if self._pushed is not None and (now - self._last_push >= _PUSH_EVERY or not self._tokens):
            self._last_push = now
            self._pushed.push(self._read())
        if self._rounds == self._said or now - self._last_line < envs.VLLM_LOG_STATS_INTERVAL:
            return
        self._last_line, self._said, numbers = now, self._rounds, self._read()
        logger.info(
            "kvkeep: %d rounds so far, %d entries a head evicted, %d of %d blocks in use where the full cache would "
            "need %d more, %d grown budgets", numbers["rounds"], numbers["evicted_entries"], numbers["blocks_in_use"],
            numbers["blocks_in_pool"], numbers["blocks_saved"], numbers["grown_budgets"],
        )  # fmt: skip

    def _read(self) -> dict[str, float]:
        return read(self._counters.engine.instance, self._counters.engine.index)
