"""The CPU backend: vLLM's own kernels on slots."""

from __future__ import annotations

from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from .backend import KeepBackend, KeepBuilder, KeepImpl
from .layouts import Layout, layout_of


class KeepCPUImpl(KeepImpl, CPUAttentionBackendImpl):
    """Attention of a layer of an engine that evicts."""


class KeepCPUBuilder(KeepBuilder, CPUAttentionMetadataBuilder):
    """Metadata of evicting layers."""

    stock = CPUAttentionMetadataBuilder

    def layout(self) -> Layout:
        """As the instruction set wants it."""
        return layout_of(self.isa)


class KeepCPUBackend(KeepBackend, CPUAttentionBackend):
    """Takes the place of CPU_ATTN."""

    impl = KeepCPUImpl
    stock_impl = CPUAttentionBackendImpl
    builder = KeepCPUBuilder
