"""What does not go together with a bounded cache, refused when the engine starts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from vllm import __version__, envs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.selector import get_attn_backend
from vllm.v1.kv_cache_interface import KVCacheSpecKind, is_quantized_kv_cache

from .config import Refused, Serving
from .versions import SUPPORTED, supported

#: Attention backends in whose place kvkeep puts its own.
BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")


def refuse(vllm_config: VllmConfig, serving: Serving) -> None:
    """Refuse what kvkeep cannot serve.

    Raises:
        Refused: with everything that is in the way, and what to do about each.
    """
    reasons = list(_reasons(vllm_config))
    if reasons:
        raise Refused("kvkeep cannot serve this configuration: " + "; ".join(reasons))
    size = vllm_config.cache_config.block_size
    if size is not None:
        serving.check_block_size(size, 32 if vllm_config.device_config.device_type == "cpu" else 16)


def refuse_backend(vllm_config: VllmConfig) -> None:
    """Refuse the attention backend that vLLM will choose, before the model is loaded, if it is not one of kvkeep's.

    vLLM chooses layer by layer; this asks for a plain layer of the model.

    Raises:
        Refused: it would serve without eviction.
    """
    model = vllm_config.model_config
    with set_current_vllm_config(vllm_config):
        dtype = model.dtype
        assert isinstance(dtype, torch.dtype)  # vLLM has resolved it
        backend = get_attn_backend(model.get_head_size(), dtype, vllm_config.cache_config.cache_dtype)
    if not getattr(backend, "evicts", False):
        raise Refused(no_such_backend(backend.get_name()))


def no_such_backend(name: str) -> str:
    """What to do about an attention backend that cannot evict."""
    if name in BACKENDS:
        return f"attention backend {name} is not kvkeep's: {_why_not_ours()}"
    able = " or ".join(f"--attention-backend {one}" for one in BACKENDS[1:])
    return f"attention backend {name} does not evict: start with {able} (on CPUs leave the option out)"


def _why_not_ours() -> str:
    """Why a backend that kvkeep replaces is vLLM's own, and what to do."""
    allowed = envs.VLLM_PLUGINS
    if allowed is not None and "kvkeep" not in allowed:
        return (
            f"VLLM_PLUGINS={','.join(allowed)} keeps vLLM from loading kvkeep's plug-in: add kvkeep to VLLM_PLUGINS, "
            "or unset it"
        )
    return (
        "its plug-in was not loaded (look for 'Failed to load plugin' in the log, reinstall kvkeep beside vLLM), or "
        "another plug-in, or the model, brings a class of its own (leave it out)"
    )


def _reasons(config: VllmConfig) -> Iterator[str]:
    if not supported(__version__):
        yield f"vLLM {__version__} is not tested (tested: {', '.join(SUPPORTED)}): install one, or remove kvkeep"
    yield from _of_the_backend(config)
    yield from _of_the_model(config)
    yield from _of_the_cache(config)
    yield from _of_parallelism(config)


def _of_the_backend(config: VllmConfig) -> Iterator[str]:
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        yield f"platform {current_platform.device_name!r} is not tested: kvkeep serves on CPUs and CUDA GPUs"
    attention = config.attention_config
    for backend in (attention.backend, attention.backend_per_kind.get(KVCacheSpecKind.FULL_ATTENTION.value)):
        if backend is not None and backend.name not in BACKENDS:
            yield no_such_backend(backend.name)


def _of_the_model(config: VllmConfig) -> Iterator[str]:
    model = config.model_config
    text = model.hf_text_config
    if model.use_mla:
        yield "multi-head latent attention has no KV heads to evict from: use a model with grouped-query attention"
    if model.is_encoder_decoder:
        yield "encoder-decoder models are not supported: use a decoder-only model"
    if model.runner_type != "generate":
        yield f"runner {model.runner_type!r} generates nothing: leave kvkeep out"
    if model.is_attention_free or model.is_hybrid:
        yield "state-space layers are not tested: use a model whose layers are all attention"
    if getattr(text, "num_kv_shared_layers", 0):
        yield "layers of this model share their cache, which kvkeep does not support"
    if model.uses_alibi or getattr(text, "model_type", "") in ("bloom", "mpt", "step1"):
        yield "ALiBi depends on where an entry lies in the cache: use a model with rotary positions"
    if model.rswa_window is not None:
        yield "reference sliding windows depend on slots: use another model"
    if model.is_mm_prefix_lm:
        yield "images whose tokens see each other depend on where entries lie: use a text model"
    if model.enable_prompt_embeds:
        yield "prompts given as embeddings have no ids to draw from: leave out --enable-prompt-embeds"


def _of_the_cache(config: VllmConfig) -> Iterator[str]:
    cache = config.cache_config
    if is_quantized_kv_cache(cache.cache_dtype):
        yield f"kv_cache_dtype {cache.cache_dtype!r} is quantised: use auto"
    if config.kv_transfer_config is not None:
        yield "KV connectors and offloading copy blocks that rounds rewrite: leave out --kv-transfer-config"
    if getattr(cache, "kv_offloading_size", None):
        yield "KV offloading copies blocks that rounds rewrite: leave out --kv-offloading-size"
    if getattr(cache, "kv_sharing_fast_prefill", False):
        yield "--kv-sharing-fast-prefill is not supported: leave it out"
    # vLLM sets it by itself beside a connector, which is refused above.
    if config.scheduler_config.disable_hybrid_kv_cache_manager and config.kv_transfer_config is None:
        yield (
            "--disable-hybrid-kv-cache-manager merges bounded caches with others and would switch eviction off: "
            "leave it out"
        )
    if config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events:
        yield "KV cache events describe blocks by their tokens, which rounds change: leave out --kv-events-config"


def _of_parallelism(config: VllmConfig) -> Iterator[str]:
    parallel = config.parallel_config
    if config.speculative_config is not None:
        yield "speculative decoding takes tokens back after rounds may have run: leave out --speculative-config"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield "context parallelism spreads a request's slots over ranks: use tensor parallelism"
    if parallel.enable_dbo:
        yield "dual batch overlap splits a step's rows: leave out --enable-dbo"
