"""What requests hold on vLLM, read from its cache: the positions that the transformers engine keeps, head by head."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import Tokens, _model, _Tokenizer, checkpoint, params, random_prompts, serving
from torch import Tensor

from kvkeep.engine import Sampling
from kvkeep.hf.cache import EvictCache
from kvkeep.hf.engine import HFEngine
from kvkeep.vllm import Serving
from kvkeep.vllm.layouts import layout_of
from kvkeep.vllm.timeline import Timeline

pytestmark = pytest.mark.vllm


class Written:
    """Keys as the transformers engine wrote them, by position, and the positions it kept in the end."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens  # that are fed in the end
        self.keys: list[list[Tensor]] = []  # of each layer, [H, n, D] each
        self.kept = torch.empty(0)

    def __call__(self, cache: EvictCache) -> None:
        """Called after each forward."""
        seen = cache.get_seq_length()
        layers = [layer.keys[0] for layer in cache.layers]
        if not self.keys:
            self.keys = [[keys[:, :seen].clone()] for keys in layers]
        else:
            slot = cache.rows[0].cached - 1
            for mine, keys in zip(self.keys, layers, strict=True):
                mine.append(keys[:, slot : slot + 1].clone())
        if seen == self.tokens:
            self.kept = cache.kept_positions(0)


def on_transformers(path: str, keep: dict[str, Any], prompt: Tokens, length: int) -> tuple[Tensor, Tensor, Tokens]:
    """Keys [L, H, T, D] by position, kept positions [L, H, n], and the trace."""
    engine = HFEngine(_model(path, "float32"), _Tokenizer(), Serving.parse(keep).settings)  # type: ignore[arg-type]
    written = Written(len(prompt) + length - 1)  # the last token is never fed
    sample = engine.generate([prompt], [0], Sampling(length, ignore_end=True), on_token=written)[0]
    return torch.stack([torch.cat(keys, dim=1) for keys in written.keys]), written.kept, sample.tokens


def on_vllm(llm: Any, prompts: list[Tokens], lengths: list[int]) -> list[tuple[Tensor, Tokens]]:
    """Keys [L, H, slots, D] of each request's blocks, and its trace, when it has generated its length."""
    core = llm.llm_engine.engine_core.engine_core
    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    caches = [context[f"model.layers.{i}.self_attn.attn"].kv_cache for i in range(len(context))]
    numbers = {}
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        numbers[llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, params(length + 8))] = i
    found: dict[int, tuple[Tensor, Tokens]] = {}
    while len(found) < len(prompts):
        for output in llm.llm_engine.step():
            tokens = list(output.outputs[0].token_ids)
            i = int(output.request_id)
            if len(tokens) == lengths[i]:
                (name,) = (r for r in core.scheduler.requests if r in numbers and numbers[r] == i)
                blocks = torch.tensor(core.scheduler.kv_cache_manager.get_block_ids(name)[0])
                found[i] = torch.stack([read(cache, blocks) for cache in caches]), tokens
    llm.llm_engine.abort_request([str(i) for i in range(len(prompts))])
    return [found[i] for i in range(len(prompts))]


def read(cache: Tensor, blocks: Tensor) -> Tensor:
    """Keys [H, slots, D] of blocks."""
    heads, size = cache.shape[1:3]
    head, block, offset = (
        x.flatten() for x in torch.meshgrid(torch.arange(heads), blocks, torch.arange(size), indexing="ij")
    )
    keys, _ = layout_of("vec").read(cache, head, (block, offset))
    return keys.view(heads, len(blocks) * size, -1)


def which(keys: Tensor, by_position: Tensor) -> Tensor:
    """Positions [L, H, n] of keys [L, H, n, D] among the keys [L, H, T, D] of all positions."""
    distance = torch.cdist(keys, by_position, compute_mode="donot_use_mm_for_euclid_dist")
    nearest = distance.topk(2, largest=False)
    assert nearest.values[..., 0].max() < 1e-3
    assert nearest.values[..., 1].min() > 1e-1
    return nearest.indices[..., 0]


KEEPS: dict[str, dict[str, Any]] = {
    "random": {},
    "groups": {"groups": 2, "window": 8},
    "model": {"draw": "model"},
    "units": {"unit": 4},
    "blocks": {"unit": 32, "draw": "model"},
    "half": {"protect": "prompt:0.5"},
    "none": {"protect": "none", "moving": "gather"},
    "recency": {"policy": "recency"},
    "streaming": {"policy": "streaming", "buffer": 16},
}


@pytest.mark.parametrize("name", KEEPS)
def test_kept_positions(name: str) -> None:
    keep = {"policy": "random", "budget": 128, "buffer": 32, "seed": 3, **KEEPS[name]}
    serves = Serving.parse(keep)
    prompts = random_prompts(5, 77, 150, 300)
    timelines = [Timeline.of(serves, len(p)) for p in prompts]
    # Read when the cache is full again, after nine rounds: then every slot up to K + r holds an entry.
    lengths = [t.first + 9 * t.every - t.prompt + 1 for t in timelines]
    with serving(checkpoint("qwen3"), keep, async_scheduling=False) as llm:
        ours = on_vllm(llm, prompts, lengths)
    for prompt, length, timeline, (keys, trace) in zip(prompts, lengths, timelines, ours, strict=True):
        by_position, kept, tokens = on_transformers(checkpoint("qwen3"), keep, prompt, length)
        assert trace == tokens
        held = timeline.kept + timeline.every
        assert keys.shape[2] == -(-held // 32) * 32  # blocks of 32: none that the timeline does not need
        positions = which(keys[:, :, :held], by_position)
        # Slots that no round writes: there, slots are positions.
        assert (positions[:, :, : timeline.shared] == torch.arange(timeline.shared)).all()
        assert positions.sort().values.tolist() == kept.expand(positions.shape).tolist()
