"""The plug-in: what vLLM loads, in every one of its processes, when kvkeep is installed beside it."""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.kvkeep")


def register() -> None:
    """Make the bounded cache known to vLLM. Nothing changes for engines that do not ask for it.

    Entry point of the group ``vllm.general_plugins``; may be called more than once in a process.
    """
    from vllm import __version__

    from .versions import supported

    if not supported(__version__):
        return  # an engine that asks for kvkeep is refused by the request tap
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from .manager import KeepManager
    from .prometheus import show
    from .spec import KeepSpec

    # First vLLM's own: a registry that holds one spec is not filled up later.
    register_all_kvcache_specs(None)
    KVCacheSpecRegistry.register(KeepSpec, KeepManager, uniform_type_base_spec=FullAttentionSpec)
    # Paths, not classes: a backend is imported where vLLM chooses it.
    register_backend(AttentionBackendEnum.CPU_ATTN, "kvkeep.vllm.cpu.KeepCPUBackend")
    register_backend(AttentionBackendEnum.FLASH_ATTN, "kvkeep.vllm.flash.KeepFlashBackend")
    register_backend(AttentionBackendEnum.TRITON_ATTN, "kvkeep.vllm.triton.KeepTritonBackend")
    show()
