"""The one call most users need."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..policies import Policy
from ..settings import Settings
from .cache import EvictCache

logger = logging.getLogger("kvkeep")


@contextmanager
def evict(
    model: PreTrainedModel,
    policy: str | Policy = "random",
    *,
    samples: Sequence[int] | None = None,
    prompt_length: int | None = None,
    context_length: int | None = None,
    keep: Tensor | None = None,
    forget: Tensor | None = None,
    **values: Any,
) -> Iterator[EvictCache]:
    """A bounded KV cache for the ``with`` block.

    ::

        with kvkeep.evict(model, "random", budget=2048, buffer=64, seed=0) as cache:
            out = model.generate(**inputs, past_key_values=cache, max_new_tokens=32768)
        cache.stats()

    Args:
        model: any decoder-only model of transformers with full-attention layers.
        policy: short name of a method, or the method itself.
        samples: sample number of each row of the batch; by default rows with equal prompts are
            numbered in order. Equal prompts with equal numbers draw alike.
        prompt_length: columns of the first prompt, padding included. By default the prompt ends
            where the first one-token forward begins, or where ``generate`` says.
        context_length: with ``prefill_keep``: columns of the prompt that are compressed, before what follows them (the
            question) is fed. They need forwards of their own: see :meth:`EvictCache.prefill`.
        keep: see :meth:`EvictCache.override`.
        forget: see :meth:`EvictCache.override`.
        **values: fields of :class:`~kvkeep.settings.Settings` (``budget``, ``buffer``, ``protect``,
            ``seed``, ...) and options of the policy (``draw``, ``unit``, ...).

    Raises:
        ValueError: something does not fit; nothing has run yet.
    """
    settings = Settings.of(policy, **values)
    if context_length is not None and (settings.prefill_keep is None or context_length < 1):
        raise ValueError(
            f"context_length={context_length}: it is the number of columns, at least 1, that prefill_keep compresses"
        )
    cache = settings.cache(model, None if samples is None else list(samples))
    cache.prompt_length, cache.context_length = prompt_length, context_length
    try:
        cache.override(keep, forget)
        yield cache
        if not cache.rows:
            logger.warning("the cache made by evict() was not used: pass it to generate as past_key_values= or cache=")
    finally:
        cache.close()
