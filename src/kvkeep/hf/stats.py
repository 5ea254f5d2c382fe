"""What a cache did and what it costs, measured on its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .layer import EvictingLayer

if TYPE_CHECKING:
    from .cache import EvictCache


def allocated(layers: Iterable[Any]) -> int:
    """Bytes allocated for the entries of cache layers; tensors that share memory count once."""
    tensors = [
        tensor
        for layer in layers
        if layer.is_initialized
        for tensor in ((layer.k, layer.v) if isinstance(layer, EvictingLayer) else (layer.keys, layer.values))
        if tensor is not None
    ]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(int(size) for size in sizes.values())


def describe(cache: EvictCache, positions: int, policy: int, peak: int) -> dict[str, Any]:
    """The dictionary of :meth:`EvictCache.stats`; ``positions``, ``policy`` and ``peak`` are bytes."""
    entries, rows = cache.nbytes(), cache.rows
    asked = None if cache.budget is None else cache.budget.total
    totals = [None if row.budget is None else row.budget.total for row in rows]
    return {
        "policy": cache.policy.title,
        "protect": cache.settings.protect_text,
        "seen": [row.seen for row in rows],
        "prompt": [row.prompt_length for row in rows],
        "protected": [row.protected for row in rows],
        "budget": [None if row.budget is None else row.budget.kept(max(row.trace_rounds - 1, 0)) for row in rows],
        "grown": [asked is not None and total is not None and total > asked for total in totals],
        "rounds": [row.trace_rounds for row in rows],
        "evicted": [row.evicted for row in rows],
        "compressed": [row.compressed for row in rows],
        "entries": [row.cached for row in rows],
        "bytes": {
            "entries": entries,
            "positions": positions,
            "policy": policy,
            "now": entries + positions + policy,
            "peak": peak,
        },
    }
