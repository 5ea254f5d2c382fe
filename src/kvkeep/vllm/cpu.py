"""The CPU backend: vLLM's own kernels on slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from .asked import asked, bounded, makes_entries, note
from .config import Refused
from .keeper import Keeper, KeepMetadata
from .layouts import layout_of
from .spec import KeepSpec


class KeepCPUImpl(CPUAttentionBackendImpl):
    """Attention of a layer of an engine that evicts; layers that do not (sliding windows) are vLLM's own."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: KeepMetadata[CPUAttentionMetadata] | CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Phase by phase: rounds, then writing, then attention. See the base class for shapes."""
        if not isinstance(attn_metadata, KeepMetadata):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        for part in attn_metadata.parts:
            part.move(layer.layer_name, kv_cache)
            at: Tensor | slice = slice(part.meta.num_actual_tokens) if part.tokens is None else part.tokens
            q, k, v = query[at], key[at], value[at]
            super().do_kv_cache_update(layer, k, v, kv_cache, part.meta.slot_mapping)
            out = output[at] if part.tokens is None else torch.empty_like(q)
            super().forward(layer, q, k, v, kv_cache, part.meta, out, output_scale, output_block_scale)
            if part.tokens is not None:
                output[at] = out
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write entries of layers that do not evict; the others' are written in :meth:`forward`, slot by slot."""
        if not getattr(layer, "kvkeep", False):
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)


class KeepCPUBuilder(CPUAttentionMetadataBuilder):
    """Metadata of evicting layers; for others the class makes vLLM's own builder."""

    def __new__(
        cls, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> Any:
        if isinstance(kv_cache_spec, KeepSpec):
            return super().__new__(cls)
        context = vllm_config.compilation_config.static_forward_context
        lost = [n for n in layer_names if asked(vllm_config) and makes_entries(context[n])]
        if lost:
            raise Refused(
                f"vLLM dropped the bounded cache of layer {lost[0]}: leave out --disable-hybrid-kv-cache-manager"
            )
        return CPUAttentionMetadataBuilder(kv_cache_spec, layer_names, vllm_config, device)

    def __init__(
        self, kv_cache_spec: KeepSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.keeper = Keeper(kv_cache_spec, layer_names, vllm_config, layout_of(self.isa))
        for name in layer_names:
            vllm_config.compilation_config.static_forward_context[name].kvkeep = True

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KeepMetadata[CPUAttentionMetadata]:
        """Cut the step into phases and run the rounds that are due."""
        build = super().build
        parts = self.keeper.parts(common_attn_metadata, lambda common: build(0, common, fast_build))
        return KeepMetadata(list(parts))


class KeepCPUBackend(CPUAttentionBackend):
    """Takes the place of CPU_ATTN; where kvkeep is not asked for, every part of it is vLLM's own."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Called while a layer is made, under its engine's configuration."""
        return KeepCPUImpl if note(get_current_vllm_config_or_none()) else CPUAttentionBackendImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """The class of builders, which looks at the spec."""
        return KeepCPUBuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Bound the cache of full-attention layers."""
        return bounded(super().customize_spec(spec))
