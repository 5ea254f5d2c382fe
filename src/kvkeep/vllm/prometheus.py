"""kvkeep's numbers on the server's ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .counters import COUNTED, Engine, clean_up_at_exit, read_all

#: Documentation of each number, by its name in :mod:`kvkeep.vllm.counters`.
METRICS = {
    "requests": "Requests admitted, once more after each preemption.",
    "grown_budgets": "Requests whose prompt made their budget larger than configured.",
    "rounds": "Eviction rounds of requests, replays after a preemption included.",
    "evicted_entries": "Entries evicted from each KV head of each layer, summed over requests.",
    "round_seconds": "Time in which the first worker planned rounds and moved entries.",
    "moved_entries": "Entries that rounds moved in the first worker's heads and layers.",
    "blocks_in_use": "Blocks of bounded caches that requests hold now; a shared one counts for each request.",
    "blocks_saved": "Blocks that the same requests would hold more with the full cache.",
    "blocks_in_pool": "Blocks of the pool, which layers that do not evict use, too.",
}
_LABELS = ("model_name", "engine")


class KeepCollector(Collector):
    """Reads the numbers when ``/metrics`` is asked for; shows nothing while no engine of this server evicts."""

    def describe(self) -> Iterable[Metric]:
        """Names, which others cannot take."""
        return _families().values()

    def collect(self) -> Iterable[Metric]:
        """All numbers of all engines."""
        engines = read_all()
        if not engines:
            return
        families = _families()
        for labels, numbers in engines.items():
            for name, family in families.items():
                family.add_metric(labels, numbers[name])
        yield from families.values()


@cache
def show() -> None:
    """Put kvkeep's numbers on this process's ``/metrics``, if it has any."""
    REGISTRY.register(KeepCollector())
    clean_up_at_exit()


class Pushed:
    """The same numbers for servers of several front-end processes, which show what other processes leave behind.

    Args:
        engine: whose numbers these are.
    """

    def __init__(self, engine: Engine) -> None:
        self._labels = (engine.model, str(engine.index))
        self._seen = dict.fromkeys(COUNTED, 0.0)

    def push(self, numbers: Mapping[str, float]) -> None:
        """Leave the numbers where the front ends find them."""
        for name, metric in _metrics().items():
            if isinstance(metric, Counter):
                metric.labels(*self._labels).inc(numbers[name] - self._seen[name])
                self._seen[name] = numbers[name]
            else:
                metric.labels(*self._labels).set(numbers[name])


def _families() -> dict[str, Any]:
    return {
        name: (CounterMetricFamily if name in COUNTED else GaugeMetricFamily)(f"kvkeep:{name}", text, labels=_LABELS)
        for name, text in METRICS.items()
    }


@cache
def _metrics() -> dict[str, Counter | Gauge]:
    # In a registry of their own: the default one may hold the collector, whose names these are.
    return {
        name: Counter(f"kvkeep:{name}", text, _LABELS, registry=None)
        if name in COUNTED
        else Gauge(f"kvkeep:{name}", text, _LABELS, registry=None, multiprocess_mode="mostrecent")
        for name, text in METRICS.items()
    }
