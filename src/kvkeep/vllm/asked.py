"""Whether an engine asks for kvkeep, remembered where vLLM does not say which engine it is about."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionType
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec

from .config import Refused, Serving
from .counters import Engine
from .refusals import no_such_backend, refuse
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
    model, index = _last.model_config, _last.parallel_config.data_parallel_index
    engine = Engine(_last.instance_id, index, str(model.served_model_name))
    layers = [x for x in _last.compilation_config.static_forward_context.values() if isinstance(x, AttentionLayerBase)]
    return KeepSpec.of(spec, serving, model.max_model_len, engine.to_text(), all(map(makes_entries, layers)))


def makes_entries(layer: object) -> bool:
    """Whether an attention layer would evict: decoder self-attention over everything."""
    return (
        getattr(layer, "attn_type", AttentionType.DECODER) == AttentionType.DECODER
        and getattr(layer, "sliding_window", None) is None
        and getattr(layer, "attention_chunk_size", None) is None
    )


def check_layers(vllm_config: VllmConfig) -> None:
    """Refuse to serve a loaded model some of whose layers would silently keep everything.

    :func:`~kvkeep.vllm.refusals.refuse_backend` comes first; this finds layers for which vLLM, or the model itself,
    chose another backend than for a plain one.

    Raises:
        Refused: names a layer and its backend.
    """
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if isinstance(layer, AttentionLayerBase) and makes_entries(layer) and not getattr(layer, "kvkeep", False):
            raise Refused(f"layer {name}: {no_such_backend(layer.get_attn_backend().get_name())}")
