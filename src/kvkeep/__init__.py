"""kvkeep: bounded KV caches for long reasoning, and honest measurements of what they cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .budget import Budget
from .policies import Policy, policies
from .settings import Settings

if TYPE_CHECKING:
    from .hf.evict import evict

__version__ = "0.1.0"
__all__ = ["Budget", "Policy", "Settings", "__version__", "evict", "policies"]


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import; only the engine needs it.
    if name == "evict":
        from .hf.evict import evict

        return evict
    raise AttributeError(f"module 'kvkeep' has no attribute {name!r}")
