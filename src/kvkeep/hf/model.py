"""What a model must be like, and where its attention layers are."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from ..policies import Policy
from ..signals import KNOWN

logger = logging.getLogger("kvkeep")

#: Model types (of the text configuration) that the test suite runs.
TESTED = frozenset({"llama", "qwen2", "qwen3", "mistral", "phi3", "gemma3_text", "gpt_oss"})
_warned: set[str] = set()


class Unsupported(ValueError):
    """A combination kvkeep refuses before any token is emitted; the message says what to do instead."""


@dataclass(frozen=True)
class ModelInfo:
    """A model as the cache sees it.

    Attributes:
        decoder: the module whose forward takes token ids, the 2D attention mask and the cache.
        attention: attention module of each evicting layer, by layer number.
        layers: cache layers of the whole model; those that will evict are plain ``DynamicLayer``.
        evicting: numbers of the layers whose entries can be evicted (full attention).
        heads: KV heads of each evicting layer.
        head: the output layer, which turns hidden states into logits.
        config: the text configuration.
        model: the whole model.
    """

    decoder: nn.Module
    attention: dict[int, nn.Module]
    layers: list[CacheLayerMixin]
    evicting: tuple[int, ...]
    heads: int
    head: nn.Module | None
    config: Any
    model: nn.Module | None = None


def implementation(module: nn.Module) -> str:
    """Name of the attention implementation a module uses right now."""
    config = getattr(module, "config", None)
    return getattr(config, "_attn_implementation", None) or "eager"


def examine(model: Any) -> ModelInfo:
    """Find a model's attention layers and refuse what cannot work.

    Args:
        model: a causal language model of transformers (or a PEFT wrapper around one).

    Raises:
        Unsupported: the model, or how it is set up, is not supported; says what to do.
    """
    if hasattr(model, "get_base_model"):  # PEFT
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise Unsupported(f"{type(model).__name__} is not a transformers model: load it with AutoModelForCausalLM")
    if model.config.is_encoder_decoder:
        raise Unsupported(f"{type(model).__name__} is an encoder-decoder: kvkeep supports decoder-only models")
    if not model.can_generate():
        raise Unsupported(f"{type(model).__name__} is not a causal language model: load it with AutoModelForCausalLM")
    _refuse_cache_settings(model)
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        raise Unsupported(
            f"{type(model).__name__} uses multi-head latent attention, whose cache has no KV heads to evict from: "
            "use a model with grouped-query attention"
        )
    if getattr(text, "alibi", False) or text.model_type in ("bloom", "mpt"):
        raise Unsupported(
            f"{type(model).__name__} adds ALiBi biases, which depend on where an entry lies in the cache: "
            "use a model with rotary positions"
        )
    if getattr(text, "num_kv_shared_layers", 0):
        raise Unsupported(f"{type(model).__name__} shares entries between layers, which kvkeep does not support")
    layers = DynamicCache(config=model.config).layers
    evicting = tuple(i for i, layer in enumerate(layers) if type(layer) is DynamicLayer)
    others = {type(layer).__name__ for layer in layers if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)}
    if others:
        raise Unsupported(
            f"{type(model).__name__} has cache layers kvkeep has not been tested with ({', '.join(sorted(others))}): "
            "use a model with full and sliding-window attention only"
        )
    if not evicting:
        raise Unsupported(
            f"every layer of {type(model).__name__} is sliding-window attention, whose cache is bounded already: "
            "use the model without kvkeep"
        )
    attention = _attention_modules(model, evicting)
    head = model.get_output_embeddings()
    return ModelInfo(_decoder(model), attention, layers, evicting, _heads(model, text), head, text, model)


def _heads(model: PreTrainedModel, text: Any) -> int:
    """KV heads of a full-attention layer by the configuration; the first forward checks it."""
    try:
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    except Exception as error:  # some configurations refuse an attribute that differs from layer to layer
        raise Unsupported(f"{type(model).__name__} has no single number of KV heads: {error}") from error
    if text.model_type not in TESTED and text.model_type not in _warned:
        _warned.add(text.model_type)
        logger.warning(
            "kvkeep has not been tested with %s models: compare a short run with policy full", text.model_type
        )
    return int(heads)


def _refuse_cache_settings(model: PreTrainedModel) -> None:
    config = getattr(model, "generation_config", None)
    chosen = getattr(config, "cache_implementation", None)
    if chosen not in (None, "dynamic"):
        raise Unsupported(
            f"the model asks for a {chosen!r} cache, which cannot evict: "
            "set model.generation_config.cache_implementation = None"
        )
    refuse_attention(model)


def refuse_attention(module: nn.Module) -> None:
    """Refuse attention implementations whose masks kvkeep cannot give."""
    name = implementation(module)
    if "flex" in name or "paged" in name:
        raise Unsupported(
            f"attention implementation {name!r} is not supported: call model.set_attn_implementation('sdpa')"
        )


def refuse_signals(policy: Policy) -> None:
    """Refuse a policy that asks for what this engine cannot show."""
    if unknown := sorted(policy.signals - KNOWN):
        raise Unsupported(f"policy {policy.name!r} asks for {', '.join(unknown)}; known are {', '.join(sorted(KNOWN))}")


def _attention_modules(model: PreTrainedModel, evicting: tuple[int, ...]) -> dict[int, nn.Module]:
    found: dict[int, nn.Module] = {}
    for module in model.modules():
        number = getattr(module, "layer_idx", None)
        # Decoder layers know their number too; only attention has a key projection.
        projects = any(hasattr(module, name) for name in ("k_proj", "qkv_proj", "query_key_value", "c_attn"))
        if number in evicting and projects:
            found[number] = module
    missing = sorted(set(evicting) - set(found))
    if missing:
        raise Unsupported(f"no attention module found for layers {missing} of {type(model).__name__}")
    return found


def _decoder(model: PreTrainedModel) -> nn.Module:
    decoder: nn.Module = model.base_model
    taken = inspect.signature(decoder.forward).parameters
    if "attention_mask" not in taken or not {"cache", "past_key_values"} & set(taken):
        raise Unsupported(f"the forward of {type(decoder).__name__} takes no attention mask or no cache")
    return decoder
