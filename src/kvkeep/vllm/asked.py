"""Whether an engine asks for kvkeep, remembered where vLLM does not say which engine it is about."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from .config import Serving
from .refusals import refuse
from .spec import KeepSpec, evicting

#: Configuration under which the last layer of this process was made: vLLM customises specs right after, without one.
_last: VllmConfig | None = None


def asked(vllm_config: VllmConfig) -> Serving | None:
    """The engine's settings; None if it does not ask for kvkeep."""
    return Serving.of(vllm_config.additional_config)


def note(vllm_config: VllmConfig | None) -> bool:
    """A layer is being made under this configuration: whether its engine asks for kvkeep.

    Raises:
        Refused: it does, with something that does not go together.
    """
    global _last
    serving = None if vllm_config is None else asked(vllm_config)
    _last = vllm_config if serving is not None else None
    if serving is not None and vllm_config is not None:
        refuse(vllm_config, serving)
    return serving is not None


def bounded(spec: AttentionSpec) -> AttentionSpec:
    """The spec with bounded requests, if the engine asks for it and the layers evict."""
    if _last is None or not evicting(spec):
        return spec
    assert isinstance(spec, FullAttentionSpec)
    serving = asked(_last)
    assert serving is not None
    instance = f"{_last.instance_id}.{_last.parallel_config.data_parallel_index}"
    return KeepSpec.of(spec, serving, _last.model_config.max_model_len, instance)


def makes_entries(layer: object) -> bool:
    """Whether an attention layer would evict: decoder self-attention over everything."""
    attn_type = getattr(layer, "attn_type", AttentionType.DECODER)
    return attn_type == AttentionType.DECODER and getattr(layer, "sliding_window", None) is None
