"""A tiny random model, made on the fly, that runs under a policy."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache as memoize
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ..hf.contract import CACHE_ARGUMENT
from ..hf.evict import evict
from ..policies import Policy

LAYERS, HEADS, GROUP, VOCABULARY = 2, 2, 2, 97
PROMPTS, TRACE = (9, 2, 6), 37

Kept = list[list[list[int]]]  # [layer][head] -> positions


@memoize
def tiny_model() -> Any:
    """A random Llama of 2 layers, 2 KV heads and 4 query heads, the same every time, with large weights."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS * GROUP, num_key_value_heads=HEADS, max_position_embeddings=512,
        initializer_range=0.15, tie_word_embeddings=False, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).float().eval()


@dataclass(frozen=True)
class Frame:
    """After a forward: columns it brought, what each row keeps, and logits [B, V] of the newest token."""

    columns: int
    kept: list[Kept]
    logits: Tensor


@dataclass
class Trial:
    """Runs a policy with K = ``total`` and r = w = ``every``; the same run is made once."""

    policy: Policy
    total: int = 24
    every: int = 4
    _runs: dict[Any, list[Frame]] = field(default_factory=dict)

    def run(self, rows: Sequence[int] = (0,), pieces: Sequence[int] = (1,), **values: Any) -> list[Frame]:
        """Feed prompts (numbers in ``PROMPTS``) in one forward, padded on the left, and traces in pieces."""
        key = (tuple(rows), tuple(pieces), *sorted(values.items()))
        if key not in self._runs:
            self._runs[key] = self._run(rows, pieces, **{"budget": self.total, **values})
        return self._runs[key]

    def _run(self, rows: Sequence[int], pieces: Sequence[int], **values: Any) -> list[Frame]:
        tokens = [self.tokens(row) for row in rows]
        width = max(PROMPTS[row] for row in rows)
        ids = torch.stack([torch.nn.functional.pad(t, (width + TRACE - len(t), 0)) for t in tokens])
        mask = torch.stack([torch.arange(width + TRACE) >= width + TRACE - len(t) for t in tokens]).long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        frames, at, turn = [], 0, 0
        with evict(tiny_model(), self.policy, buffer=self.every, seed=7, prompt_length=width, **values) as cache:
            while at < width + TRACE:
                space = width if not at else min(cache.trace_space() or TRACE, pieces[turn % len(pieces)])
                end = min(at + space, width + TRACE)
                told = {"attention_mask": mask[:, :end], "position_ids": positions[:, at:end], CACHE_ARGUMENT: cache}
                with torch.no_grad(), cache.as_trace() if at else nullcontext():
                    logits = tiny_model()(input_ids=ids[:, at:end], use_cache=True, **told).logits[:, -1]
                kept = [cache.kept_positions(row).tolist() for row in range(len(rows))]
                kept = [[[[p for p in head if p >= 0] for head in heads] for heads in row] for row in kept]
                frames.append(Frame(end - at, kept, logits))
                at, turn = end, turn + (at > 0)
        return frames

    @staticmethod
    def tokens(row: int) -> Tensor:
        """Prompt and trace, int64 [T], no token twice: equal tokens would have near ties."""
        generator = torch.Generator().manual_seed(100 + row)
        return torch.randperm(VOCABULARY - 1, generator=generator)[: PROMPTS[row] + TRACE] + 1
