"""The cache spec: full attention whose requests never need more than K + r slots."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Self

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from .config import Serving


@dataclass(frozen=True, kw_only=True)
class KeepSpec(FullAttentionSpec):
    """Cache of one evicting layer.

    Attributes:
        keep: the settings, as :meth:`Serving.to_json` writes them: the spec travels between processes.
        longest: tokens of the longest request the model takes.
        instance: tells engines apart, text of :class:`~kvkeep.vllm.counters.Engine`.
        alone: whether all of the model's layers evict.
    """

    keep: str
    longest: int
    instance: str
    alone: bool

    @classmethod
    def of(cls, spec: FullAttentionSpec, serving: Serving, longest: int, instance: str, alone: bool) -> Self:
        """``spec`` with bounded requests."""
        values = {f.name: getattr(spec, f.name) for f in fields(spec) if f.init}
        return cls(**values, keep=serving.to_json(), longest=longest, instance=instance, alone=alone)

    @property
    def serving(self) -> Serving:
        """The settings."""
        return Serving.from_json(self.keep)

    @property
    def slots(self) -> int:
        """Most slots of a request whose prompt does not make its budget grow."""
        return min(self.serving.slots, self.longest)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of a request of ``max_model_len`` tokens whose prompt fits into the budget."""
        tokens = min(self.serving.slots, vllm_config.model_config.max_model_len)
        return cdiv(tokens, self.block_size) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """One spec for layers that share a block table; their settings must be the same."""
        first = specs[0]
        if any(spec != first for spec in specs):
            # The one error that vLLM takes for an answer: it asks whether any layers can be merged.
            raise AssertionError("layers with different caches or eviction settings cannot share a block table")
        return first


def evicting(spec: AttentionSpec) -> bool:
    """Whether layers of this spec are made to evict: plain full attention."""
    return type(spec) is FullAttentionSpec and spec.sliding_window is None and spec.attention_chunk_size is None
