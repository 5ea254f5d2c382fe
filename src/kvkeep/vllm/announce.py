"""What the scheduler's process says at start."""

from __future__ import annotations

import logging

from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv

from .spec import KeepSpec
from .timeline import Timeline

logger = logging.getLogger("vllm.kvkeep")


def announce(spec: KeepSpec, pool: int) -> None:
    """Say what is on, how many more requests fit, and what the pool cannot hold.

    Args:
        spec: the evicting layers' cache.
        pool: blocks that requests can have.
    """
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
    if pool < cdiv(min(longest, Timeline.of(serving, max(1, longest - 1)).slots), size):
        logger.warning(
            "kvkeep: the pool holds %d slots, less than a prompt may have (up to max_model_len = %d). A request whose "
            "prompt and budget need more would wait for ever, and those behind it too: lower --max-model-len, give the "
            "cache more memory, or limit prompts before they reach the server", pool * size, longest,
        )  # fmt: skip
