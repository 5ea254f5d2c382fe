"""What the attention backends share: classes to mix into vLLM's own.

Each evicting backend is three subclasses of vLLM's (backend, implementation, metadata builder) with one of these mixed
in before. Layers and engines that do not evict get vLLM's own classes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from .asked import asked, bounded, makes_entries, note
from .config import Refused
from .described import Fixed
from .keeper import Keeper
from .layouts import Layout
from .parts import KeepMetadata
from .spec import KeepSpec

#: Stands for vLLM's class, which comes next in the order of inheritance.
_Stock: Any = object


class KeepImpl(_Stock):
    """Attention of a layer of an engine that evicts; layers that do not (sliding windows) are vLLM's own."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Phase by phase: rounds, then writing, then attention. See vLLM's class for shapes."""
        if not isinstance(attn_metadata, KeepMetadata):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        scales = output_scale, output_block_scale
        for part in attn_metadata.parts:
            part.move(layer.layer_name, kv_cache)
            at = part.tokens
            q, k, v = (query, key, value) if at is None else (query[at], key[at], value[at])
            out = output if at is None else output[at]
            # There may be more keys than slots (padding): the writing kernels go by the slots.
            super().do_kv_cache_update(layer, k, v, kv_cache, part.meta.slot_mapping)
            super().forward(layer, q, k, v, kv_cache, part.meta, out, *scales)
            if at is not None:
                output[at] = out
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write entries of layers that do not evict.

        vLLM calls this before :meth:`forward`, with slots that it computed from positions. Evicting layers write in
        :meth:`forward` instead, where their own slots are known: eagerly or inside a captured graph, as the attention.
        """
        if not getattr(layer, "kvkeep", False):
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def fused_rope_kvcache_supported(self) -> bool:
        """No kernel may write entries by vLLM's slots."""
        return False

    def fused_qk_norm_rope_kvcache_supported(self) -> bool:
        """No kernel may write entries by vLLM's slots."""
        return False

    def fused_qk_norm_mrope_kvcache_supported(self) -> bool:
        """No kernel may write entries by vLLM's slots."""
        return False


class KeepBuilder(_Stock):
    """Metadata of evicting layers; for others the class makes vLLM's own builder.

    Class attributes:
        stock: vLLM's builder.
    """

    stock: ClassVar[type]
    keeper: Keeper | None = None

    def __new__(
        cls,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
        **more: Any,
    ) -> Any:
        if isinstance(kv_cache_spec, KeepSpec):
            return super().__new__(cls)
        if asked(vllm_config):
            _check_kept(layer_names, vllm_config)
        # vLLM derives builders of its own from ours (cross attention, chunks): these stay what they are.
        if "stock" not in vars(cls):
            return super().__new__(cls)
        return cls.stock(kv_cache_spec, layer_names, vllm_config, device, **more)

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
        **more: Any,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, **more)
        if not isinstance(kv_cache_spec, KeepSpec):
            return
        layout, fixed = self.layout(), self.fixed(vllm_config, device)
        self.keeper = Keeper(kv_cache_spec, layer_names, vllm_config, layout, fixed)
        # vLLM would put another group's block table into finished metadata.
        self.supports_update_block_table = False
        self.supports_draft_decode_metadata_update = False
        for name in layer_names:
            vllm_config.compilation_config.static_forward_context[name].kvkeep = True

    def layout(self) -> Layout:
        """How the caches lie in memory."""
        raise NotImplementedError

    def fixed(self, vllm_config: VllmConfig, device: torch.device) -> Fixed | None:
        """Memory for steps that may replay a captured graph; None if none ever does."""
        return None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Full graphs are for steps in which each request has one token: such a step is a single phase."""
        support = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        if asked(vllm_config) is None:
            return support
        return min(support, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, key=lambda one: one.value)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """Cut the step into phases and run the rounds that are due before its first tokens, in all layers."""
        build = super().build
        if self.keeper is None:
            return build(common_prefix_len, common_attn_metadata, fast_build)
        # What slower builds prepare lies in memory that the parts of a step share, so only a whole step may have it.
        parts = self.keeper.parts(common_attn_metadata, lambda common, whole: build(0, common, fast_build or not whole))
        return KeepMetadata(list(parts))

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Describe a step without requests, for capture or for an idle replay: no round is due in it."""
        if self.keeper is None:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        return KeepMetadata.whole(
            super().build(0, self.keeper.described.blank(common_attn_metadata)), self.keeper.layout
        )


class KeepBackend(_Stock):
    """Takes the place of vLLM's backend of the same name; where kvkeep is not asked for, it behaves as vLLM's own.

    Class attributes:
        impl: the evicting implementation.
        stock_impl: vLLM's.
        builder: the evicting builder.
        evicts: tells these backends from vLLM's.
    """

    evicts: ClassVar[bool] = True
    impl: ClassVar[type]
    stock_impl: ClassVar[type]
    builder: ClassVar[type]

    @classmethod
    def get_impl_cls(cls) -> type:
        """Called while a layer is made, under its engine's configuration."""
        return cls.impl if note(get_current_vllm_config_or_none()) else cls.stock_impl

    @classmethod
    def get_builder_cls(cls) -> type:
        """The class of builders, which looks at the spec."""
        return cls.builder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Bound the cache of full-attention layers."""
        return bounded(super().customize_spec(spec))


def _check_kept(layer_names: list[str], vllm_config: VllmConfig) -> None:
    """Refuse to serve layers without eviction that were made to evict."""
    context = vllm_config.compilation_config.static_forward_context
    lost = [name for name in layer_names if makes_entries(context[name])]
    if lost:
        raise Refused(f"vLLM dropped the bounded cache of layer {lost[0]}: leave out --disable-hybrid-kv-cache-manager")
