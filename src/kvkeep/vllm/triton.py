"""TRITON_ATTN: vLLM's own Triton kernels on slots. Not yet run on a GPU; see :mod:`kvkeep.vllm.gpu`."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from .backend import KeepBackend, KeepImpl
from .gpu import KeepGPUBuilder
from .layouts import LAYOUTS, Layout
from .parts import KeepMetadata


class KeepTritonImpl(KeepImpl, TritonAttentionImpl):
    """Attention of a layer of an engine that evicts."""


class KeepTritonBuilder(KeepGPUBuilder, TritonAttentionMetadataBuilder):
    """Metadata of evicting layers."""

    stock = TritonAttentionMetadataBuilder

    def layout(self) -> Layout:
        """Rows of a key and a value."""
        return LAYOUTS["triton"]

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """As vLLM's, with lengths of one entry: longer ones would make the capture slow."""
        made = super().build_for_cudagraph_capture(common_attn_metadata)
        if isinstance(made, KeepMetadata):
            made.parts[0].meta.seq_lens.fill_(1)
        return made


class KeepTritonBackend(KeepBackend, TritonAttentionBackend):
    """Takes the place of TRITON_ATTN."""

    impl = KeepTritonImpl
    stock_impl = TritonAttentionImpl
    builder = KeepTritonBuilder
