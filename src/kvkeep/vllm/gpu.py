"""What the GPU backends share. Not yet run on a GPU: written from the sources of vLLM 0.32, model runner V1.

CUDA graphs. vLLM replays a graph of the whole model only for steps in which every request has exactly one token, since
the builders here report no more than that. Such a step is one phase, and its rounds have run in `build`, before the
graph, on the same stream. What the graph reads (lengths, slots, the block table where rounds edit it) lies at fixed
addresses. All other steps run the attention eagerly, between pieces of the model that may be graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata

from .backend import KeepBuilder
from .described import Fixed


class KeepGPUBuilder(KeepBuilder):
    """Metadata of evicting layers on a GPU."""

    def fixed(self, vllm_config: VllmConfig, device: torch.device) -> Fixed:
        """Memory for the largest batch, padding included."""
        scheduler, captured = vllm_config.scheduler_config, vllm_config.compilation_config.max_cudagraph_capture_size
        rows = max(scheduler.max_num_seqs, captured or 0)
        return Fixed(rows, max(scheduler.max_num_batched_tokens, rows), device)

    def update_block_table(self, metadata: Any, *args: Any) -> Any:
        """vLLM's own for layers that do not evict."""
        if self.keeper is not None:
            raise RuntimeError("the block table of an evicting layer follows its rounds and cannot be replaced")
        return super().update_block_table(metadata, *args)

    def build_for_drafting(self, common_attn_metadata: CommonAttentionMetadata, draft_index: int) -> Any:
        """Only speculative decoding drafts, which is refused when the engine starts."""
        if self.keeper is not None:
            raise RuntimeError("kvkeep does not work with speculative decoding: leave out --speculative-config")
        return super().build_for_drafting(common_attn_metadata, draft_index)
