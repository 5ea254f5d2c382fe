"""What the scheduler's process says at start."""

from __future__ import annotations

import logging

from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv

from .config import Refused
from .spec import KeepSpec
from .timeline import Timeline

logger = logging.getLogger("vllm.kvkeep")


def announce(spec: KeepSpec, pool: int) -> None:
    """Say what is on and how many more requests fit.

    Args:
        spec: the evicting layers' cache.
        pool: blocks that requests can have.

    Raises:
        Refused: the pool cannot hold every prompt that may come.
    """
    _check_pool(spec, pool)
    serving, size, longest = spec.serving, spec.block_size, spec.longest
    bounded, full = cdiv(spec.slots, size), cdiv(longest, size)
    beside = " beside those of its prompt" if serving.settings.scope == "trace" else ""
    fit = f", so {pool / bounded:.1f} such requests fit at once instead of {pool / full:.1f}"
    if not spec.alone or beside:
        fit = " (the line about the KV cache's concurrency counts all layers)" if not spec.alone else ""
    logger.info(
        "kvkeep: %s, K = %d and r = %d per KV head, admission %s: a request of %d tokens takes %d blocks of %d slots%s "
        "instead of %d%s", serving.policy.title, serving.budget.total, serving.budget.every, serving.admission, longest,
        bounded, size, beside, full, fit,
    )  # fmt: skip
    best = serving.best_block_size(32 if current_platform.is_cpu() else 16)
    if spec.slots % size and spec.slots < longest and spec.slots % best == 0:
        logger.info(
            "kvkeep: the last of a request's blocks is not full (%d slots in blocks of %d); --block-size %d would "
            "waste none", spec.slots, size, best,
        )  # fmt: skip


def _check_pool(spec: KeepSpec, pool: int) -> None:
    """A prompt that the pool cannot hold would wait for ever, and all requests behind it: vLLM does not skip it."""
    size, longest = spec.block_size, spec.longest
    prompt = min(spec.serving.max_prompt or longest, longest - 1)
    need = cdiv(min(longest, Timeline.of(spec.serving, max(1, prompt)).slots), size)
    if pool < need:
        raise Refused(
            f"the pool has {pool} blocks of {size} slots, and a prompt of {prompt} tokens needs {need}. It would wait "
            "for ever, and those behind it too. Give the cache more memory, lower --max-model-len, or, if no client "
            f'sends prompts this long, say how long they are: "max_prompt": {max(1, _fitting(spec, pool))}'
        )


def _fitting(spec: KeepSpec, pool: int) -> int:
    """Tokens of the longest prompt that the pool can hold."""
    low, high = 0, spec.longest
    while high - low > 1:  # slots grow with the prompt
        middle = (low + high) // 2
        fits = cdiv(min(spec.longest, Timeline.of(spec.serving, middle).slots), spec.block_size) <= pool
        low, high = (middle, high) if fits else (low, middle)
    return low
