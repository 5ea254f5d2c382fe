"""The scheduler's side: a request takes no more blocks than its budget, and caches none that a round may write."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, ClassVar

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SingleTypeKVCacheManager
from vllm.v1.request import Request

from .announce import announce
from .progress import Progress
from .spec import KeepSpec
from .timeline import Timeline

logger = logging.getLogger("vllm.kvkeep")


class _Held:
    """What a request may hold.

    Attributes:
        timeline: its slots and rounds.
        slots: most slots it needs from now on.
        surplus: blocks it needs once round 0 has cut an unprotected prompt down; None if it never has more.
        shared: full blocks of its prompt that no round writes.
    """

    __slots__ = ("shared", "slots", "surplus", "timeline")

    def __init__(self, timeline: Timeline, size: int, shares: bool) -> None:
        self.timeline, self.slots = timeline, timeline.slots
        bounded = timeline.kept + timeline.every
        self.surplus = cdiv(bounded, size) if timeline.slots > bounded else None
        self.shared = timeline.shared // size if shares else 0


class KeepManager(FullAttentionManager):
    """Blocks of requests whose cache is bounded.

    vLLM asks for slots up to a token; this manager answers with slots up to what the request's timeline needs there.
    What rounds do with the slots is the workers' business: nothing of it changes which blocks a request has.
    """

    # A hit inside a block would share its rest, which rounds write.
    supports_fine_grained_hash_lookup: ClassVar[bool] = False

    def __init__(self, kv_cache_spec: KeepSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.serving = kv_cache_spec.serving
        self.longest = kv_cache_spec.longest
        self.serving.check_block_size(self.block_size)  # vLLM may have made blocks larger than it was asked to
        self._held: dict[str, _Held] = {}
        self._reserves = self.serving.admission == "reserve"
        self.progress = Progress(self, kv_cache_spec.instance, f"scheduler{self.kv_cache_group_id}")
        # A waiting request is looked at in every step, and prompts of one length have one timeline.
        self._timeline = lru_cache(maxsize=1024)(self._made)
        if self.progress.first:
            announce(kv_cache_spec, self.block_pool.num_gpu_blocks - 1)  # block 0 is vLLM's null block

    # ---- how many blocks ----------------------------------------------------------------------------

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Blocks to take for ``num_tokens`` tokens; see the base class."""
        slots = self._slots(request_id, num_tokens, prefill_end == num_tokens)
        return super().get_num_blocks_to_allocate(
            request_id,
            slots,
            new_computed_blocks,
            total_computed_tokens,
            num_local_computed_tokens,
            slots,
            apply_admission_cap,
            prefill_end,
        )

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Take blocks for ``num_tokens`` tokens; see the base class."""
        slots = self._slots(request_id, num_tokens)
        self.progress.scheduled(request_id, self._held[request_id].timeline, num_tokens)
        return super().allocate_new_blocks(request_id, slots, slots)

    def _slots(self, request_id: str, tokens: int, is_prompt: bool = False) -> int:
        held = self._held.get(request_id)
        # Nothing is held at vLLM's first look at a waiting request, before it says how long the prompt is. A new
        # request's tokens are its prompt. One that was preempted may ask for too little there; the next look is exact.
        slots = self._timeline(tokens if is_prompt else 1).slots if held is None else held.slots
        return min(slots, self.longest if self._reserves else tokens)

    def _made(self, prompt: int) -> Timeline:
        timeline = Timeline.of(self.serving, prompt)
        pool = self.block_pool.num_gpu_blocks - 1
        if cdiv(min(timeline.slots, self.longest), self.block_size) > pool:
            logger.error(
                "kvkeep: a prompt of %d tokens does not fit into the pool of %d blocks, although max_prompt = %s "
                "promises shorter ones: it waits for ever, and those behind it, until it is aborted", prompt, pool,
                self.serving.max_prompt,
            )  # fmt: skip
        return timeline

    # ---- a request's life ---------------------------------------------------------------------------

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Learn the prompt's length, and give back what an unprotected prompt took beyond K + r."""
        if num_prompt_tokens is None:
            raise RuntimeError("vLLM did not say how long the prompt is: kvkeep does not support this version")
        held = self._held.get(request_id)
        if held is None:
            timeline = self._timeline(num_prompt_tokens)
            held = self._held[request_id] = _Held(timeline, self.block_size, self.serving.shares_prompts)
        elif held.timeline.prompt != num_prompt_tokens:
            raise RuntimeError(
                f"the prompt of request {request_id} grew from {held.timeline.prompt} to {num_prompt_tokens} tokens "
                "while it ran: kvkeep does not support streamed inputs, send the whole conversation as a new request"
            )
        if held.surplus is not None and processed_computed_tokens > held.timeline.first:
            # The forward that cut the prompt down is over: nothing reads the blocks behind any more.
            blocks = self.req_to_blocks[request_id]
            self.block_pool.free_blocks(reversed(blocks[held.surplus :]))
            del blocks[held.surplus :]
            held.slots, held.surplus = held.timeline.kept + held.timeline.every, None

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        """Offer full prompt blocks to other requests, if no round writes prompts."""
        # Once admitted, a request must not adopt cached blocks again: after a preemption they could be another
        # request's prompt that goes on like this one's trace, and rounds would write them.
        request.skip_reading_prefix_cache = True
        held = self._held[request.request_id]
        if self.num_cached_block.get(request.request_id, 0) >= held.shared:
            return
        # Past the full-attention manager, which also offers a prompt's last, partial block: it holds trace too.
        SingleTypeKVCacheManager.cache_blocks(
            self,
            request,
            min(num_tokens, held.timeline.shared),
            retention_interval,
            replay_boundaries=replay_boundaries,
        )

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget a request that ended or was preempted."""
        self._held.pop(request_id, None)
        blocks = super().pop_blocks_for_free(request_id)
        self.progress.end(request_id)
        return blocks

    def new_step_starts(self) -> None:
        """A new step: publish the numbers of the last one."""
        self.progress.publish()
