"""The vLLM engine: bounded caches on a server, on vLLM's official extension points only.

    LLM(model, additional_config={"kvkeep": {"policy": "random", "budget": 2048, "buffer": 64}})

Importing this package imports nothing of vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .config import KEY, SEED, Refused, Serving

if TYPE_CHECKING:
    from vllm import LLM

__all__ = ["KEY", "SEED", "Refused", "Serving", "stats"]


def stats(llm: LLM) -> dict[str, float]:
    """What the bounded cache of an offline engine did so far.

    Args:
        llm: an engine made with ``additional_config={"kvkeep": ...}``; its processes must run on this machine.

    Returns:
        Cumulative: ``requests`` (admissions), ``grown_budgets``, ``rounds``, ``evicted_entries`` (of each head),
        ``round_seconds``, ``moved_entries``; now: ``blocks_in_use``, ``blocks_saved``, ``blocks_in_pool``. Empty if
        the engine does not evict.
    """
    from .counters import read

    return read(llm.llm_engine.vllm_config.instance_id)
