"""Models whose attention takes the cache by another name, has other heads, or biases by slot."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache as memoize
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
)

from kvkeep.hf.model import Unsupported
from masked import Rule, check_row, close, taped
from models import NO_END, VOCAB, counted, generate, left_pad, prompt
from small import K, R, evict
from test_hf_forwards import hooks
from test_hf_turns import converse

# ---- attention that takes the cache by another name, or in another shape ---------------------------


def _sizes(**values: Any) -> dict[str, Any]:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    return {**sizes, "max_position_embeddings": 512, "initializer_range": 0.15, **NO_END, **values}


def _falcon(**values: Any) -> PreTrainedModel:
    plain = {"multi_query": False, "new_decoder_architecture": False, "alibi": False}
    return FalconForCausalLM(FalconConfig(**_sizes(**{**plain, **values})))


FOREIGN: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_sizes(intermediate_size=48))),
    "falcon": _falcon,
    "falcon-grouped": lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2),
}


@memoize
def foreign(family: str) -> PreTrainedModel:
    """A model whose attention is given the cache as ``layer_past=``; the reference finds its attention, too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FOREIGN[family]().eval()
    model.generation_config.do_sample = False
    layers = model.gpt_neox.layers if family == "gpt-neox" else model.transformer.h
    attention = [getattr(layer, "attention", None) or layer.self_attention for layer in layers]
    model.model = SimpleNamespace(layers=[SimpleNamespace(self_attn=module) for module in attention])
    return model


@pytest.mark.parametrize("family", FOREIGN)
def test_a_padded_batch_where_attention_gets_layer_past(family: str) -> None:
    """Its masks were lost: the hook looked for the cache among the attention's arguments."""
    model, rows = foreign(family), [prompt(13), prompt(6)]
    batch = left_pad(rows)
    with evict(model, track_positions=True) as cache, taped(model, cache) as frames:
        found = generate(model, cache, batch["input_ids"], 30, attention_mask=batch["attention_mask"])
        kept = [cache.kept_positions(i) for i in range(2)]
    for i, ids in enumerate(rows):
        n = ids.shape[1]
        assert check_row(model, frames, found.sequences[i : i + 1, 13 - n :], Rule(K, R, R, share=1), n, i, 13) >= 2
        with evict(model) as cache:
            alone = generate(model, cache, ids, 30)
            assert torch.equal(cache.kept_positions(), kept[i])
        assert torch.equal(found.sequences[i, 13:], alone.sequences[0, n:])
        close(torch.stack(found.logits)[:, i], torch.stack(alone.logits)[:, 0])


@pytest.mark.parametrize("family", FOREIGN)
def test_a_second_turn_where_attention_gets_layer_past(family: str) -> None:
    """A turn lies among older entries, which also needs a mask of its own."""
    model, rule = foreign(family), Rule(40, R, R, share=1)
    with evict(model, budget=40, track_positions=True) as cache:
        frames, ids, turns = converse(model, cache, left_pad([prompt(11)]), [50, 30], [7])
    assert check_row(model, frames, ids, rule, 11, turns=turns) >= 8


def test_a_model_with_other_kv_heads_than_its_configuration_says() -> None:
    """Falcon's multi-query attention stores one head, its configuration says 4: refused before a token comes out."""
    model = _falcon(multi_query=True).eval()
    with counted(model) as forwards:
        with evict(model) as cache, pytest.raises(Unsupported, match="1 KV heads, the model's configuration says 4"):
            generate(model, cache, prompt(11), 30)
        assert not forwards


@pytest.mark.parametrize("family", ["bloom", "falcon"])
def test_alibi_is_refused(family: str) -> None:
    """ALiBi counts distances in slots, which eviction changes."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    model = BloomForCausalLM(BloomConfig(**sizes, **NO_END)) if family == "bloom" else _falcon(alibi=True)
    with pytest.raises(Unsupported, match=r"ALiBi.*rotary"), evict(model):
        pass
    assert hooks(model) == 0
