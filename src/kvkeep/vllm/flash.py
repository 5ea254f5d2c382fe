"""FLASH_ATTN: vLLM's own FlashAttention kernels on slots. Not yet run on a GPU; see :mod:`kvkeep.vllm.gpu`.

FlashAttention 3 plans its work ahead in `build`, from the lengths: these are the lengths in slots. The plan lies in a
buffer of the builder that the parts of a step would overwrite for each other, so steps of several parts go without.
"""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from .backend import KeepBackend, KeepImpl
from .gpu import KeepGPUBuilder
from .layouts import LAYOUTS, Layout


class KeepFlashImpl(KeepImpl, FlashAttentionImpl):
    """Attention of a layer of an engine that evicts."""


class KeepFlashBuilder(KeepGPUBuilder, FlashAttentionMetadataBuilder):
    """Metadata of evicting layers."""

    stock = FlashAttentionMetadataBuilder

    def layout(self) -> Layout:
        """Rows of a key and a value."""
        return LAYOUTS["flash_attn"]


class KeepFlashBackend(KeepBackend, FlashAttentionBackend):
    """Takes the place of FLASH_ATTN."""

    impl = KeepFlashImpl
    stock_impl = FlashAttentionImpl
    builder = KeepFlashBuilder
