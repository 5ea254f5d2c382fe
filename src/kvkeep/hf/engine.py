"""The transformers engine behind the :class:`~kvkeep.engine.Engine` door."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    SuppressTokensLogitsProcessor,
)

from ..draws import stream_of
from ..engine import Sample, Sampling
from ..settings import Settings
from .cache import EvictCache

#: Name under which the installed transformers takes a cache.
CACHE_ARGUMENT = "cache" if Version(transformers.__version__) >= Version("5.24.0") else "past_key_values"


class HFEngine:
    """Runs a transformers model under one policy.

    Args:
        model: a causal language model of transformers, in eval mode.
        tokenizer: its tokenizer; names end and padding tokens and turns traces into text.
        settings: policy, budget, protection, seed.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples: Sequence[int],
        sampling: Sampling,
        *,
        streamer: Any = None,
        on_token: Callable[[EvictCache], None] | None = None,
    ) -> list[Sample]:
        """Generate one trace a prompt, all in one left-padded batch. See :meth:`kvkeep.engine.Engine.generate`.

        Args:
            prompts: token ids, one sequence a request.
            samples: sample number of each request.
            sampling: how tokens are chosen.
            streamer: a transformers streamer, for a single request.
            on_token: called with the cache after each token.
        """
        if len(prompts) != len(samples):
            raise ValueError(f"{len(prompts)} prompts need as many sample numbers, got {len(samples)}")
        ids, mask = self._batch(prompts)
        ends = self._end_tokens()
        processors = LogitsProcessorList()
        if sampling.ignore_end and ends:
            processors.append(SuppressTokensLogitsProcessor(ends, device=str(self.model.device)))
        cache = self.settings.cache(self.model, samples)
        try:
            with torch.no_grad(), self._seeded(sampling, samples), self._only(self._config(sampling, ends)):
                out = self.model.generate(
                    ids,
                    attention_mask=mask,
                    logits_processor=processors,
                    stopping_criteria=None if on_token is None else [_Watcher(cache, on_token)],
                    streamer=streamer,
                    **{CACHE_ARGUMENT: cache},
                )
            stats = cache.stats()
        finally:
            cache.close()
        return [self._sample(row, ends, _of_row(stats, i)) for i, row in enumerate(out[:, ids.shape[1] :].tolist())]

    @contextmanager
    def _seeded(self, sampling: Sampling, samples: Sequence[int]) -> Iterator[None]:
        """Sampling draws from its own seed, which the sample numbers enter; the global generator is left alone."""
        if sampling.temperature == 0:
            yield
            return
        with torch.random.fork_rng():
            torch.manual_seed(stream_of(samples, sampling.seed))
            yield

    @contextmanager
    def _only(self, config: GenerationConfig) -> Iterator[None]:
        """Generate with ``config`` alone: generate() fills what it leaves open from the model's own defaults."""
        own, self.model.generation_config = self.model.generation_config, config
        try:
            yield
        finally:
            self.model.generation_config = own

    def force(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        samples: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Log-probability of given traces, float32 [T] each. See :meth:`kvkeep.engine.Engine.force`.

        The trace is fed in chunks that end where a round is due, so the result is that of feeding
        it token by token.
        """
        if len(prompts) != len(continuations):
            raise ValueError(f"{len(prompts)} prompts need as many continuations, got {len(continuations)}")
        numbers = [0] * len(prompts) if samples is None else samples
        return [self._force(p, c, n) for p, c, n in zip(prompts, continuations, numbers, strict=True)]

    def _force(self, prompt: Sequence[int], continuation: Sequence[int], sample: int) -> Tensor:
        if not prompt or not continuation:
            raise ValueError("teacher forcing needs a prompt and a continuation of at least one token each")
        device = self.model.device
        trace = torch.tensor([list(continuation)], device=device)
        cache = self.settings.cache(self.model, [sample])
        found: list[Tensor] = []
        try:
            with torch.no_grad():
                logits = self._forward(torch.tensor([list(prompt)], device=device), cache)[:, -1:]
                done = 0
                while True:
                    found.append(logits.float().log_softmax(-1))
                    if done >= trace.shape[1] - 1:
                        break
                    space = cache.trace_space()
                    size = min(trace.shape[1] - 1 - done, space or _CHUNK, _CHUNK)
                    with cache.as_trace():
                        logits = self._forward(trace[:, done : done + size], cache)
                    done += size
        finally:
            cache.close()
        scores = torch.cat(found, dim=1)
        return scores.gather(-1, trace.unsqueeze(-1))[0, :, 0].cpu()

    def _forward(self, ids: Tensor, cache: EvictCache) -> Tensor:
        logits: Tensor = self.model(ids, use_cache=True, **{CACHE_ARGUMENT: cache}).logits
        return logits

    def _batch(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        if not prompts or any(len(p) == 0 for p in prompts):
            raise ValueError("every prompt needs at least one token, and there must be at least one prompt")
        width = max(len(p) for p in prompts)
        pad = self._pad_token()
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], device=self.model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.model.device)
        return ids, mask

    def _config(self, sampling: Sampling, ends: list[int]) -> GenerationConfig:
        sampled = sampling.temperature > 0
        return GenerationConfig(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=sampled,
            temperature=sampling.temperature if sampled else None,
            top_p=sampling.top_p if sampled else None,
            top_k=0 if sampled else None,
            eos_token_id=None if sampling.ignore_end else ends or None,
            pad_token_id=self._pad_token(),
        )

    def _end_tokens(self) -> list[int]:
        named = getattr(self.model.generation_config, "eos_token_id", None)
        ends = named if isinstance(named, list) else [] if named is None else [named]
        own = self.tokenizer.eos_token_id
        return sorted({*ends, *([] if own is None else [own])})

    def _pad_token(self) -> int:
        for token in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        return 0  # masked, so any id will do

    def _sample(self, tokens: list[int], ends: list[int], stats: dict[str, Any]) -> Sample:
        stop = next((i for i, token in enumerate(tokens) if token in ends), None)
        kept = tokens if stop is None else tokens[: stop + 1]
        return Sample(self.tokenizer.decode(kept, skip_special_tokens=True), kept, stats)


_CHUNK = 512  # tokens a teacher-forced forward brings at most, which bounds its logits


def _of_row(stats: dict[str, Any], row: int) -> dict[str, Any]:
    """One row's share of a batch's stats; bytes stay those of the whole batch."""
    mine = {k: v[row] if isinstance(v, list) else v for k, v in stats.items()}
    return {**mine, "batch": len(stats["seen"])}


class _Watcher:
    """A stopping criterion that never stops: the one place `generate` calls after each token."""

    def __init__(self, cache: EvictCache, on_token: Callable[[EvictCache], None]) -> None:
        self.cache, self.on_token = cache, on_token

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.on_token(self.cache)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
