"""What cannot work is refused before any token is emitted, with a sentence that says what to do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AttentionInterface,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import kvkeep
from kvkeep.hf.model import Unsupported
from models import NO_END, VOCAB, counted, generate, left_pad, prompt, step, tiny

K, R = 24, 4


def evict(model: Any, **values: Any) -> Any:
    return kvkeep.evict(model, **{"budget": K, "buffer": R, **values})


def refuse(match: str, values: dict[str, Any], ids: torch.Tensor | None = None, new: int = 60, **more: Any) -> None:
    """``generate`` raises ``match`` without a single forward having come through."""
    model = tiny("llama")
    with counted(model) as forwards:
        with pytest.raises(ValueError, match=match), evict(model, **values) as cache:
            generate(model, cache, prompt(11) if ids is None else ids, new, **more)
        assert not forwards, "tokens were emitted before the refusal"


def copied(**settings: Any) -> PreTrainedModel:
    """A model of one's own, whose settings may be spoilt."""
    model = copy.deepcopy(tiny("llama"))
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    return model


# ---- settings -----------------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "unknown policy": ({"policy": "randon"}, "unknown policy 'randon': did you mean random"),
    "unknown option": ({"drow": "head"}, "no option 'drow'.*draw"),
    "option of another policy": ({"policy": "recency", "draw": "head"}, "no option 'draw'"),
    "unknown draw": ({"draw": "row"}, "draw must be one of head, layer, model"),
    "no budget": ({"budget": None}, "needs a budget"),
    "budget below buffer": ({"budget": 4}, "not larger than the buffer"),
    "window above budget": ({"window": 25}, "smaller than the window"),
    "unit and buffer": ({"unit": 3}, "unit=3 does not divide the buffer of 4"),
    "unit and budget": ({"unit": 4, "budget": 26}, "unit=4 does not divide the budget of 26"),
    "unit and window": ({"unit": 4, "window": 6}, "unit=4.*window"),
    "unit of nothing": ({"unit": 0}, "unit must be.* at least 1"),
    "groups and heads": ({"groups": 3}, "groups=3 does not divide the model's 2 KV heads"),
    "groups and draw": ({"groups": 2, "draw": "layer"}, "groups=2 goes with draw='head'"),
    "protection": ({"protect": "promt"}, "'promt' is not understood"),
    "share": ({"protect": "prompt:1.5"}, "between 0 and 1"),
    "pin": ({"protect": "pin:7-3"}, "is not understood"),
    "scope": ({"scope": "all"}, "scope must be one of total, trace, grow"),
    "growth": ({"growth": 0.5}, "growth must be a number of at least 1"),
    "seed": ({"seed": 1.5}, "seed must be a whole number"),
    "samples": ({"samples": [1, 2]}, "samples has 2 numbers for a batch of 1"),
    "prompt length": ({"prompt_length": 0}, "prompt_length must be at least 1"),
    "keep of a wrong type": ({"keep": torch.ones(1, 1, 1, 9)}, "keep and forget are bool"),
    "keep of a wrong shape": ({"keep": torch.ones(1, 7, 2, 50, dtype=torch.bool)}, "keep|mask"),
    "forget of a wrong shape": ({"forget": torch.ones(2, 3, 2, 50, dtype=torch.bool)}, "forget|mask"),
    "keep more than fits": ({"keep": torch.ones(1, 1, 1, 70, dtype=torch.bool)}, "keep"),
}


@pytest.mark.parametrize("case", WRONG)
def test_settings_that_do_not_fit(case: str) -> None:
    values, match = WRONG[case]
    refuse(match, values)


PROMPTS: dict[str, tuple[dict[str, Any], int, str]] = {
    "prompt": ({}, 21, "does not fit: 21 protected entries and a window of 4 need a budget of at least 25, got 24"),
    "half a prompt": ({"protect": "prompt:0.5"}, 42, "does not fit: 21 protected"),
    "sinks": ({"protect": "sinks:21"}, 30, "does not fit: 21 protected"),
    "pins": ({"protect": "prompt+pin:30-40"}, 11, "does not fit: 21 protected"),
    "what to do": ({}, 200, 'scope="grow".*scope="trace"'),
    "unit": ({"unit": 4}, 21, "does not fit"),
    "long and not protected, unit": ({"unit": 2, "protect": "none"}, 33, "unit=2.*use unit=1"),
}


@pytest.mark.parametrize("case", PROMPTS)
@pytest.mark.parametrize("chunk", [None, 7])
def test_a_prompt_that_does_not_fit(case: str, chunk: int | None) -> None:
    """In one piece nothing runs; in chunks no token comes out, although first chunks ran."""
    values, length, match = PROMPTS[case]
    if chunk is None:
        refuse(match, values, prompt(length))
        return
    model = tiny("llama")
    with pytest.raises(ValueError, match=match), evict(model, **values) as cache, counted(model) as forwards:
        generate(model, cache, prompt(length), 60, prefill_chunk_size=chunk)
    assert len(forwards) < -(-length // chunk)


def test_a_prompt_that_just_fits() -> None:
    """One token less than what is refused above."""
    with evict(tiny("llama")) as cache:
        generate(tiny("llama"), cache, prompt(20), 40)
        assert cache.kept_positions()[0, 0, :20].tolist() == list(range(20))


@pytest.mark.parametrize(("values", "match"), [({}, "new turn of 20 tokens|does not fit"), ({"unit": 2}, "unit=1")])
def test_a_turn_that_does_not_fit(values: dict[str, Any], match: str) -> None:
    """Refused before anything is evicted: the cache goes on as if nothing had been asked."""
    model, ids = tiny("llama"), prompt(60, seed=3)
    with evict(model, **values) as cache, evict(model, **values) as other:
        for used in (cache, other):
            step(model, used, ids[:, :11])
            for t in range(11, 40):
                step(model, used, ids[:, t : t + 1])
        with pytest.raises(ValueError, match=match), cache.as_prompt():
            step(model, cache, ids[:, 40:60])
        assert cache.stats() == other.stats()
        for t in range(40, 60):
            assert torch.equal(step(model, cache, ids[:, t : t + 1]), step(model, other, ids[:, t : t + 1]))


# ---- models -------------------------------------------------------------------------------------


def _small(**values: Any) -> dict[str, Any]:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **NO_END, **values}


def sliding() -> Any:
    return MistralForCausalLM(MistralConfig(**_small(sliding_window=8)))


def mla() -> Any:
    sizes = {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4}
    sizes |= {"qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**_small(**sizes, topk_group=1, moe_intermediate_size=8)))


def encoder_decoder() -> Any:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, **sizes))


def linear() -> Any:
    sizes = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    sizes |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    types = ["linear_attention", "full_attention"]
    more = {"linear_value_head_dim": 8, "shared_expert_intermediate_size": 8, "layer_types": types}
    return Qwen3NextForCausalLM(Qwen3NextConfig(**_small(**sizes, **more)))


def flex() -> Any:
    model = copied()
    model.config._attn_implementation = "flex_attention"
    return model


MODELS: dict[str, tuple[Any, str]] = {
    "sliding window only": (sliding, "sliding-window attention.*without kvkeep"),
    "latent attention": (mla, "multi-head latent attention.*grouped-query"),
    "encoder-decoder": (encoder_decoder, "encoder-decoder.*decoder-only"),
    "linear attention": (linear, "cache layers kvkeep has not been tested with|full and sliding-window attention"),
    "static cache": (lambda: copied(cache_implementation="static"), "'static' cache, which cannot evict"),
    "quantised cache": (lambda: copied(cache_implementation="quantized"), "'quantized' cache, which cannot evict"),
    "flex attention": (flex, r"'flex_attention' is not supported.*set_attn_implementation\('sdpa'\)"),
    "no head": (lambda: LlamaModel(tiny("llama").config), "AutoModelForCausalLM"),
    "no model": (lambda: torch.nn.Linear(2, 2), "AutoModelForCausalLM"),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_work(case: str) -> None:
    """Refused when the cache is made; nothing stays on the model."""
    make, match = MODELS[case]
    model = make()
    with pytest.raises(Unsupported, match=match), evict(model):
        pass
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_attention_changed_after_the_cache_was_made() -> None:
    """flex attention takes masks kvkeep cannot make: the forward refuses too. (A stand-in: flex compiles for long.)"""
    AttentionInterface.register("flex_standin", sdpa_attention_forward)
    AttentionMaskInterface.register("flex_standin", sdpa_mask)
    model, batch = copied(), left_pad([prompt(11), prompt(7)])
    with evict(model) as cache, counted(model) as forwards:
        model.config._attn_implementation = "flex_standin"
        with pytest.raises(ValueError, match="flex_standin"):
            step(model, cache, batch["input_ids"], attention_mask=batch["attention_mask"])
        assert not forwards


# ---- calls --------------------------------------------------------------------------------------


def test_assisted_decoding() -> None:
    """It takes tokens back, which a bounded cache cannot do."""
    refuse("assisted decoding", {}, prompt_lookup_num_tokens=3)
    refuse("assisted decoding", {}, assistant_model=tiny("llama-mha"))


def test_a_second_cache_by_name() -> None:
    """transformers itself refuses a cache and a cache implementation together."""
    refuse("cache", {}, cache_implementation="static")


MASKS: dict[str, tuple[list[list[int]], str]] = {
    "right padding": ([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], "padded on the right.*left padding"),
    "hole": ([[1, 1, 1, 1, 1], [1, 0, 0, 1, 1]], "in the middle"),
    "hole behind padding": ([[1, 1, 1, 1, 1], [0, 1, 0, 1, 1]], "in the middle"),
    "too short": ([[1, 1, 1], [1, 1, 1]], "attention mask has shape"),
    "other batch": ([[1, 1, 1, 1, 1]], "attention mask has shape"),
}


@pytest.mark.parametrize("case", MASKS)
def test_masks_that_cannot_work(case: str) -> None:
    model, (mask, match) = tiny("llama"), MASKS[case]
    with counted(model) as forwards, evict(model) as cache, pytest.raises(ValueError, match=match):
        step(model, cache, prompt(5).expand(2, -1), attention_mask=torch.tensor(mask))
    assert not forwards


@pytest.mark.parametrize("prompt_length", [None, 5])
def test_an_empty_row(prompt_length: int | None) -> None:
    """generate says how long the prompt is; else a row may begin in a later chunk, but not in the trace."""
    model, ids, mask = tiny("llama"), prompt(5).expand(2, -1), torch.tensor([[1] * 5, [0] * 5])
    if prompt_length is None:
        refuse("empty prompt", {}, ids, attention_mask=mask)
    with evict(model, prompt_length=prompt_length) as cache, pytest.raises(ValueError, match="empty prompt"):
        step(model, cache, ids, attention_mask=mask)
        step(model, cache, ids[:, :1])


def test_a_4d_mask() -> None:
    """In the prompt and at a decoding step, whose 2D masks are not looked at."""
    model = tiny("llama")
    with evict(model) as cache:
        with pytest.raises(ValueError, match="2D mask"):
            step(model, cache, prompt(5), attention_mask=torch.ones(1, 1, 5, 5, dtype=torch.bool))
        step(model, cache, prompt(5))
        with pytest.raises(ValueError, match="2D mask"):
            step(model, cache, prompt(1), attention_mask=torch.ones(1, 1, 1, 6, dtype=torch.bool))


def test_another_batch_size() -> None:
    model = tiny("llama")
    with evict(model) as cache:
        step(model, cache, prompt(5))
        with pytest.raises(ValueError, match=r"holds 1 rows and got a forward of 2: call reset\(\)"):
            step(model, cache, prompt(1).expand(2, -1))


def test_another_model() -> None:
    with evict(tiny("llama")) as cache, pytest.raises(RuntimeError, match="the model it was made for"):
        step(tiny("qwen2"), cache, prompt(5))


def test_taking_tokens_back() -> None:
    with evict(tiny("llama")) as cache:
        step(tiny("llama"), cache, prompt(5))
        with pytest.raises(Unsupported, match="assisted decoding"):
            cache.crop(-1)


def test_masks_of_probes_come_before_the_first_round() -> None:
    model = tiny("llama")
    with evict(model) as cache:
        generate(model, cache, prompt(11), 40)
        with pytest.raises(ValueError, match=r"before the first round: call reset\(\)"):
            cache.override(keep=torch.ones(1, 1, 1, 5, dtype=torch.bool))
