"""kvkeep's numbers on the server's ``/metrics`` and in its log."""

from __future__ import annotations

import logging
import time
from functools import cache
from typing import Any

from prometheus_client import Gauge
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from .config import Serving
from .counters import read

logger = logging.getLogger("vllm.kvkeep")

#: Documentation of each number, by its name in :mod:`kvkeep.vllm.counters`.
METRICS = {
    "requests": "Requests admitted, once more after each preemption (cumulative).",
    "grown_budgets": "Requests whose prompt made their budget larger than configured (cumulative).",
    "rounds": "Eviction rounds of requests, replays after a preemption included (cumulative).",
    "evicted_entries": "Entries evicted from each KV head of each layer, summed over requests (cumulative).",
    "round_seconds": "Time in which the first worker planned rounds and moved entries (cumulative).",
    "moved_entries": "Entries that rounds moved in the first worker's heads and layers (cumulative).",
    "blocks_in_use": "Blocks that requests hold now.",
    "blocks_saved": "Blocks that the same requests would hold more with the full cache.",
    "blocks_total": "Blocks of the pool.",
}
_EVERY = 1.0  # seconds between two looks at the numbers


@cache
def _gauges() -> dict[str, Gauge]:
    # Gauges, cumulative ones too: with several API servers each sees the same totals, and counters would add them up.
    labels = ["model_name", "engine"]
    return {
        name: Gauge(f"kvkeep:{name}", text, labels, multiprocess_mode="mostrecent") for name, text in METRICS.items()
    }


class KeepStats(StatLoggerBase):
    """Stat logger of one engine; entry point of the group ``vllm.stat_logger_plugins``."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._asked = Serving.of(vllm_config.additional_config) is not None
        self._instance = f"{vllm_config.instance_id}.{engine_index}"
        self._labels = (str(vllm_config.model_config.served_model_name), str(engine_index))
        self._last, self._logged = 0.0, 0.0
        if self._asked:
            self._look()

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: MultiModalCacheStats | None = None,
        engine_idx: int = 0,
    ) -> None:
        """A step is over."""
        if self._asked and time.monotonic() - self._last > _EVERY:
            self._look()

    def _look(self) -> dict[str, Any]:
        self._last = time.monotonic()
        numbers = read(self._instance)
        for name, gauge in _gauges().items():
            gauge.labels(*self._labels).set(numbers.get(name, 0.0))
        return numbers

    def log(self) -> None:
        """One line beside vLLM's own, while rounds run."""
        numbers = self._look() if self._asked else {}
        if numbers.get("rounds", 0.0) == self._logged:
            return
        self._logged = numbers["rounds"]
        logger.info(
            "kvkeep: %d rounds so far, %d entries a head evicted, %d of %d blocks in use where the full cache would "
            "need %d more, %d grown budgets", numbers["rounds"], numbers["evicted_entries"], numbers["blocks_in_use"],
            numbers["blocks_total"], numbers["blocks_saved"], numbers["grown_budgets"],
        )  # fmt: skip

    def log_engine_initialized(self) -> None:
        """Nothing: the scheduler's process says what is on."""
