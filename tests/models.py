"""Tiny random models of every family kvkeep supports, and the few calls tests make on them.

Their weights are large (``initializer_range`` 0.15, not 0.02), so that leaving out a single entry
changes logits by 0.05 and more, while two correct ways of computing them agree to 5e-6: a wrong mask
or a wrong kept set cannot hide. With still larger weights rounding alone reaches 1e-5, also between
transformers' own cache and no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache as memoize
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()

VOCAB = 97
CACHE = "cache" if Version(transformers.__version__) >= Version("5.24.0.dev0") else "past_key_values"
HYBRID = ("sliding_attention", "full_attention", "sliding_attention", "full_attention")
NO_END: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}


def _common(**values: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        **NO_END,
        **values,
    }


def _llama(**values: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**_common(**values)))


def _gemma3() -> PreTrainedModel:
    sizes = {"num_hidden_layers": 4, "head_dim": 8, "sliding_window": 8, "layer_types": list(HYBRID)}
    return Gemma3ForCausalLM(Gemma3TextConfig(**_common(**sizes, query_pre_attn_scalar=8)))


def _gpt_oss() -> PreTrainedModel:
    sizes = {"num_hidden_layers": 4, "head_dim": 8, "sliding_window": 8, "layer_types": list(HYBRID)}
    # Both experts are always chosen: rounding errors must not switch experts.
    return GptOssForCausalLM(GptOssConfig(**_common(**sizes, num_local_experts=2, num_experts_per_tok=2)))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": _llama,
    "llama-mha": lambda: _llama(num_key_value_heads=4),
    "llama-mqa": lambda: _llama(num_key_value_heads=1),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**_common(use_sliding_window=False))),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_common(head_dim=16))),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_common(sliding_window=None))),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**_common(sliding_window=None))),
    "gemma3": _gemma3,
    "gpt-oss": _gpt_oss,
}
CASES = [
    (name, attention)
    for name in FAMILIES
    for attention in ("sdpa", "eager")
    if (name, attention) != ("gpt-oss", "sdpa")
]


def tiny(family: str, attention: str = "sdpa") -> PreTrainedModel:
    """The model of a family: float32, eval, the same weights every time. Made once a process."""
    return _made(family, attention)


@memoize
def _made(family: str, attention: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FAMILIES[family]()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.copy_(torch.linspace(-1, 1, len(weight)))
    model.set_attn_implementation(attention)
    assert model.config._attn_implementation == attention
    model.generation_config.do_sample = False
    return model.float().eval()


def evicting_layers(model: PreTrainedModel) -> list[int]:
    """Full-attention layers, read from the configuration alone."""
    types = getattr(model.config, "layer_types", None)
    count = model.config.num_hidden_layers
    return [i for i in range(count) if types is None or types[i] == "full_attention"]


def prompt(n: int, seed: int = 0) -> Tensor:
    """Random token ids [1, n] without the padding id 0."""
    return torch.randint(1, VOCAB, (1, n), generator=torch.Generator().manual_seed(1000 * seed + n))


def left_pad(rows: list[Tensor]) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` of rows [1, n] padded on the left to the longest."""
    longest = max(row.shape[1] for row in rows)
    ids = [torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows]
    mask = [torch.nn.functional.pad(torch.ones_like(row), (longest - row.shape[1], 0)) for row in rows]
    return {"input_ids": torch.cat(ids), "attention_mask": torch.cat(mask)}


def step(model: PreTrainedModel, cache: Any, ids: Tensor, **values: Any) -> Tensor:
    """One forward with the cache, without gradients: logits [B, q, V]."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=True, **{CACHE: cache}, **values).logits
    return logits


def generate(model: PreTrainedModel, cache: Any, ids: Tensor, new: int, **values: Any) -> Any:
    """Greedy generation of ``new`` tokens: ``.sequences`` [B, T] and ``.logits``, a tuple of [B, V]."""
    values = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, **values}
    if cache is not None:
        values[CACHE] = cache
    values.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(input_ids=ids, max_new_tokens=new, **values)


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[list[int]]:
    """Counts the forwards that came through, to show that a refusal came before the first token."""
    done: list[int] = []
    handle = model.register_forward_hook(lambda module, args, output: done.append(1))
    try:
        yield done
    finally:
        handle.remove()
