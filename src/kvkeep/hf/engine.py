"""The transformers engine behind the :class:`~kvkeep.engine.Engine` door."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    SuppressTokensLogitsProcessor,
)

from ..draws import stream_of
from ..engine import Forced, Sample, Sampling
from ..settings import Settings
from .cache import EvictCache
from .contract import CACHE_ARGUMENT
from .force import HFForcing, as_batch, collect, feed
from .meter import Meter
from .model import examine

_ROWS = 64  # of a batch that `force` puts together


class HFEngine:
    """Runs a transformers model under one policy.

    Args:
        model: a causal language model of transformers, in eval mode.
        tokenizer: its tokenizer; names end and padding tokens and turns traces into text.
        settings: policy, budget, protection, seed.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: Settings) -> None:
        self.model, self.tokenizer, self.settings = model, tokenizer, settings

    @property
    def kv_shape(self) -> tuple[int, int]:
        """See :class:`kvkeep.engine.Engine`."""
        info = examine(self.model)
        return len(info.evicting), info.heads

    @property
    def context(self) -> int | None:
        """See :class:`kvkeep.engine.Engine`."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def with_settings(self, settings: Settings) -> HFEngine:
        """See :meth:`kvkeep.engine.Engine.with_settings`."""
        return HFEngine(self.model, self.tokenizer, settings)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples: Sequence[int],
        sampling: Sampling,
        forced: Sequence[Sequence[int]] | None = None,
        *,
        streamer: Any = None,
        on_token: Callable[[EvictCache], None] | None = None,
    ) -> list[Sample]:
        """Generate one trace a prompt, all in one left-padded batch. See :meth:`kvkeep.engine.Engine.generate`.

        Args:
            prompts: token ids, one sequence a request.
            samples: sample number of each request.
            sampling: how tokens are chosen.
            forced: what each trace is forced to begin with.
            streamer: a transformers streamer, for a single request.
            on_token: called with the cache after each token.
        """
        if len(prompts) != len(samples):
            raise ValueError(f"{len(prompts)} prompts need as many sample numbers, got {len(samples)}")
        ids, mask = self._batch(prompts)
        traces = None if forced is None else self._traces(prompts, forced)
        ends = self._end_tokens()
        processors = LogitsProcessorList()
        if sampling.ignore_end and ends:
            processors.append(SuppressTokensLogitsProcessor(ends, device=str(self.model.device)))
        cache = self.settings.cache(self.model, samples)
        meter = Meter(cache)
        try:
            with torch.no_grad(), self._seeded(sampling, prompts, samples), self._only(self._config(sampling, ends)):
                if traces is not None:
                    for _ in feed(self.model, cache, meter, ids, traces, last_only=True):
                        pass
                    ids = torch.cat([ids, traces], dim=1)  # generate feeds what the cache has not seen: the last token
                    mask = torch.ones_like(ids)
                with nullcontext() if traces is None else cache.as_trace():
                    out = self.model.generate(
                        ids,
                        attention_mask=mask,
                        logits_processor=processors,
                        stopping_criteria=[_Watcher(cache, meter, on_token)],
                        streamer=streamer,
                        **{CACHE_ARGUMENT: cache},
                    )
            kept = [_until_end(row, ends) for row in out[:, ids.shape[1] :].tolist()]
            begun = 0 if traces is None else traces.shape[1]
            stats = meter.stats([begun + len(tokens) for tokens in kept])
        finally:
            cache.close()
        return [
            Sample(self.tokenizer.decode(tokens, skip_special_tokens=True), tokens, mine)
            for tokens, mine in zip(kept, stats, strict=True)
        ]

    def _traces(self, prompts: Sequence[Sequence[int]], forced: Sequence[Sequence[int]]) -> Tensor:
        if len(forced) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many forced beginnings, got {len(forced)}")
        as_batch(prompts, "prompt", self.model.device)  # refuses unequal lengths
        return as_batch(forced, "trace", self.model.device)

    @contextmanager
    def _seeded(self, sampling: Sampling, prompts: Sequence[Sequence[int]], samples: Sequence[int]) -> Iterator[None]:
        """Sampling draws from its own seed, which prompts and samples enter; the global generator is left alone."""
        if sampling.temperature == 0:
            yield
            return
        with torch.random.fork_rng():
            streams = [stream_of(prompt, sample) for prompt, sample in zip(prompts, samples, strict=True)]
            torch.manual_seed(stream_of(streams, sampling.seed))
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
        *,
        keep: Tensor | None = None,
        forget: Tensor | None = None,
    ) -> list[Forced]:
        """Log-probabilities of given traces, in the order asked. See :meth:`kvkeep.engine.Engine.force`.

        Requests of equal lengths run together, up to 64 at a time.
        """
        numbers = self._check_forced(prompts, continuations, samples)
        for mask in (keep, forget):
            if mask is not None and mask.shape[0] not in (1, len(prompts)):
                raise ValueError(f"keep and forget have a row for each of the {len(prompts)} requests, or a single one")
        alike: dict[tuple[int, int], list[int]] = {}
        for i, (prompt, trace) in enumerate(zip(prompts, continuations, strict=True)):
            alike.setdefault((len(prompt), len(trace)), []).append(i)
        found: dict[int, Forced] = {}
        for rows in (r[i : i + _ROWS] for r in alike.values() for i in range(0, len(r), _ROWS)):
            traces = [continuations[i] for i in rows]
            kept, forgot = (m if m is None or m.shape[0] == 1 else m[rows] for m in (keep, forget))
            forcing = self.logits(
                [prompts[i] for i in rows], traces, [numbers[i] for i in rows], keep=kept, forget=forgot
            )
            found.update(zip(rows, collect(forcing, as_batch(traces, "continuation", self.model.device)), strict=True))
        return [found[i] for i in range(len(prompts))]

    def logits(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        samples: Sequence[int] | None = None,
        *,
        keep: Tensor | None = None,
        forget: Tensor | None = None,
    ) -> HFForcing:
        """Distributions along given traces, chunk by chunk. See :meth:`kvkeep.engine.Engine.logits`.

        A chunk ends where a round is due, so the result is that of feeding token by token, and holds at most 512
        tokens and 128 MiB.
        """
        numbers = self._check_forced(prompts, continuations, samples)
        ids = as_batch(prompts, "prompt", self.model.device)
        traces = as_batch(continuations, "continuation", self.model.device)
        whole = ids.shape[1] + traces.shape[1]
        if self.context is not None and whole > self.context:
            raise ValueError(f"{whole} tokens are more than the {self.context} this model was made for")
        cache = self.settings.cache(self.model, numbers)
        try:
            if keep is not None or forget is not None:
                cache.override(keep, forget)
            return HFForcing(self.model, cache, ids, traces)
        except BaseException:
            cache.close()
            raise

    @staticmethod
    def _check_forced(prompts: Sequence[Any], continuations: Sequence[Any], samples: Sequence[int] | None) -> list[int]:
        """Sample numbers, 0 by default, one a request."""
        if len(prompts) != len(continuations):
            raise ValueError(f"{len(prompts)} prompts need as many continuations, got {len(continuations)}")
        if samples is not None and len(samples) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many sample numbers, got {len(samples)}")
        return [0] * len(prompts) if samples is None else list(samples)

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


def _until_end(tokens: list[int], ends: list[int]) -> list[int]:
    """A row's own tokens: what follows its end token is padding."""
    stop = next((i for i, token in enumerate(tokens) if token in ends), None)
    return tokens if stop is None else tokens[: stop + 1]


class _Watcher:
    """A stopping criterion that never stops: the one place `generate` calls after each forward."""

    def __init__(self, cache: EvictCache, meter: Meter, on_token: Callable[[EvictCache], None] | None) -> None:
        self.cache, self.meter, self.on_token = cache, meter, on_token
        self._go: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.meter.note()
        if self.on_token is not None:
            self.on_token(self.cache)
        if self._go is None:
            self._go = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        return self._go
