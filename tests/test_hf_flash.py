"""The FlashAttention path, with a stand-in that runs on a CPU.

The stand-in reads the 2D mask exactly as transformers' flash wrapper does (``_upad_input``): keys
are unpadded by the mask, queries by its last q columns, and what remains is causal, aligned at the
bottom right. Whatever the cache hands it must therefore give sdpa's logits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask

import kvkeep
from masked import Rule, check_row, close, taped
from models import FAMILIES, generate, left_pad, prompt, step, tiny

NAME = "kvkeep_flash_standin"
K, R = 40, 4


def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
    """One row without padding: [H, q, D] on [H, k, D], causal at the bottom right."""
    q, k = query.shape[1], key.shape[1]
    distance = torch.arange(k - q, k)[:, None] - torch.arange(k)[None, :]
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    scores = (query @ key.transpose(1, 2)) * scaling
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value


def standin(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers: [B, H, q, D] in, [B, q, H, D] out."""
    rows, heads, q, width = query.shape
    scaling = width**-0.5 if scaling is None else scaling
    key, value = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (key, value))
    out = torch.zeros_like(query)
    for i in range(rows):
        if attention_mask is None:
            out[i] = attend(query[i], key[i], value[i], scaling, sliding_window)
            continue
        assert attention_mask.shape == (rows, key.shape[2]), "flash unpads keys by a 2D mask of their length"
        mask = attention_mask.bool()[i]
        queries = torch.ones(1, dtype=torch.bool) if q == 1 < key.shape[2] else mask[-q:]
        out[i][:, queries] = attend(query[i][:, queries], key[i][:, mask], value[i][:, mask], scaling, sliding_window)
    return out.transpose(1, 2).contiguous(), None


@pytest.fixture(params=["llama", "qwen3", "gemma3"])
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The stand-in's model and the same model under sdpa."""
    AttentionInterface.register(NAME, standin)
    AttentionMaskInterface.register(NAME, flash_attention_mask)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FAMILIES[request.param]().eval()
    model.config._attn_implementation = NAME  # set_attn_implementation would look for a flash package
    model.generation_config.do_sample = False
    return model, tiny(request.param)


def evict(model: Any, **values: Any) -> Any:
    return kvkeep.evict(model, **{"budget": K, "buffer": R, "seed": 7, **values})


def test_the_standin_is_right(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    """Without kvkeep it equals sdpa, padded or not."""
    for rows in ([prompt(13)], [prompt(13), prompt(6), prompt(9)]):
        batch = left_pad(rows)
        flash, sdpa = (
            generate(model, None, batch["input_ids"], 20, attention_mask=batch["attention_mask"]) for model in pair
        )
        assert torch.equal(flash.sequences, sdpa.sequences)
        close(torch.stack(flash.logits), torch.stack(sdpa.logits))


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("lengths", [[13], [13, 6, 9]])
@pytest.mark.parametrize("protect", ["prompt", "none"])
def test_two_turns(
    pair: tuple[PreTrainedModel, PreTrainedModel], lengths: list[int], chunk: int | None, protect: str
) -> None:
    """Prefill (whole, or 5 + 5 + 3), more than six rounds, a second turn, more rounds."""
    batch, told, extra = left_pad([prompt(n) for n in lengths]), [], {} if chunk is None else {"prefill_chunk_size": 5}
    for model in pair:
        with evict(model, protect=protect, track_positions=True) as cache, taped(model, cache) as frames:
            ids, mask = batch["input_ids"], batch["attention_mask"]
            first = generate(model, cache, ids, 55, attention_mask=mask, **extra)
            ids = torch.cat([first.sequences, prompt(6).expand(len(lengths), -1)], dim=1)
            mask = torch.cat([mask, mask.new_ones(len(lengths), ids.shape[1] - mask.shape[1])], dim=1)
            second = generate(model, cache, ids, 30, attention_mask=mask)
            told.append((first, second, [cache.kept_positions(i) for i in range(len(lengths))]))
            assert min(cache.stats()["rounds"]) >= 6
    for flash, sdpa in zip(told[0][:2], told[1][:2], strict=True):
        assert torch.equal(flash.sequences, sdpa.sequences)
        close(torch.stack(flash.logits), torch.stack(sdpa.logits))
    assert all(map(torch.equal, told[0][2], told[1][2]))
    rule, turns = Rule(K, R, R, share=float(protect == "prompt")), [range(67, 74)]
    for i, n in enumerate(lengths):  # against the reference, which runs under sdpa
        check_row(pair[1], frames, second.sequences[i : i + 1, 13 - n :], rule, n, i, 13, turns)


def test_trace_chunks(pair: tuple[PreTrainedModel, PreTrainedModel]) -> None:
    """Several trace tokens at once in a padded batch whose rows hold different numbers of entries."""
    ids, mask = left_pad([prompt(13), prompt(6)]).values()
    trace = prompt(60, seed=2).expand(2, -1)
    ids, mask = torch.cat([ids, trace], dim=1), torch.cat([mask, torch.ones_like(trace)], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = []
    for model in pair:
        logits, first = [], 0
        with evict(model) as cache:
            while first < ids.shape[1]:
                size = 13 if not first else min(cache.trace_space(), 3, ids.shape[1] - first)
                end = first + size
                with cache.as_trace() if first else cache.as_prompt():
                    part = {"attention_mask": mask[:, :end], "position_ids": positions[:, first:end]}
                    logits.append(step(model, cache, ids[:, first:end], **part))
                first = end
        found.append(torch.cat(logits, dim=1))
    flash, sdpa = (logits[mask.bool()] for logits in found)
    close(flash, sdpa)
