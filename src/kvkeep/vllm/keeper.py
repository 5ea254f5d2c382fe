"""What every attention backend does with a step: cut it into phases, run rounds, address slots instead of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import CommonAttentionMetadata

from .config import Refused
from .counters import Counters
from .described import Describer, Fixed
from .layouts import Layout
from .parts import KeepMetadata, Part
from .requests import Tracked
from .rounds import LayerMoves, Rounds
from .spec import KeepSpec
from .steps import Phase, Rows
from .tap import RequestTap, tap_of
from .transfer import send
from .views import Heads

M = TypeVar("M")


class Keeper:
    """Cuts steps for the layers that share a block table and a metadata builder.

    Never waits for the device: all decisions are functions of what vLLM knows on the host.

    Args:
        spec: their cache.
        layer_names: vLLM's names of the layers.
        vllm_config: the engine's configuration.
        layout: how the caches lie in memory.
        fixed: memory for steps that may replay a captured graph; None: each step gets its own.
    """

    def __init__(
        self,
        spec: KeepSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        layout: Layout,
        fixed: Fixed | None = None,
    ) -> None:
        self.serving, self.block_size, self.layout = spec.serving, spec.block_size, layout
        self.serving.check_block_size(self.block_size)  # vLLM may have made blocks larger than it was asked to
        self.described = Describer(spec.serving, spec.block_size, fixed)
        self.layer_names, self._config = layer_names, vllm_config
        self.rounds = Rounds(self.serving, _heads(spec, layer_names, vllm_config), spec.block_size)
        self._rows = Rows([])
        rank = vllm_config.parallel_config.rank
        self._counters = Counters(spec.instance, f"worker{rank}-{extract_layer_index(layer_names[0])}")
        self._counts = get_tensor_model_parallel_rank() == 0  # the other ranks do the same at the same time

    @property
    def tap(self) -> RequestTap:
        """Who is in which row."""
        return tap_of(self._config)

    def parts(
        self, common: CommonAttentionMetadata, build: Callable[[CommonAttentionMetadata, bool], M]
    ) -> Iterator[Part[M]]:
        """Cut a step; rounds due before its first tokens run at once, in all layers.

        Args:
            common: vLLM's description of the step, in tokens.
            build: makes the backend's metadata of a description in slots; told whether the part is the whole step.
                Only then may its tensors be used by a captured graph.
        """
        rows = self._known_rows(common)
        if rows is None:  # a dummy step, which serves no request
            yield from KeepMetadata.whole(build(common, True), self.layout).parts
            return
        count = len(rows.requests)
        seen = common.seq_lens_cpu_upper_bound
        if seen is None:
            raise RuntimeError(
                "vLLM did not say on the host how long sequences are: kvkeep does not support this runner"
            )
        described = self.described.plain(common, rows, seen[:count].numpy())
        if described is not None:
            yield from KeepMetadata.whole(build(described, True), self.layout).parts
            return
        starts = common.query_start_loc_cpu[: count + 1].numpy().astype(np.int64)
        computed = seen[:count].numpy().astype(np.int64) - np.diff(starts)
        for number, phase in enumerate(rows.phases(starts, computed)):
            whole = phase.tokens is None
            table = self._table(rows, phase, common.block_table_tensor)
            moves = self._due(rows, phase, table)
            tokens = None if phase.tokens is None else send(torch.from_numpy(phase.tokens), table.device)
            described = (
                self.described.whole(common, phase, table) if whole else self.described.part(common, phase, table)
            )
            part = Part(build(described, whole), tokens, moves, self.layout, self._count)
            if number == 0:
                for layer in moves:
                    part.move(layer, self._config.compilation_config.static_forward_context[layer].kv_cache)
                part.moves = {}
            yield part

    # ---- rows -------------------------------------------------------------------------------------

    def _known_rows(self, common: CommonAttentionMetadata) -> Rows | None:
        known = self.tap.rows
        if not known:
            return None
        if known != self._rows.requests:  # requests are compared by identity
            self._rows = Rows([r for r in known if r is not None])
        if len(self._rows.requests) != len(known) or len(known) > common.num_reqs:
            raise RuntimeError(f"the batch has {common.num_reqs} rows, and kvkeep's tap knows {len(known)} of them")
        return self._rows

    def _table(self, rows: Rows, phase: Phase, table: Tensor) -> Tensor:
        begin = time.perf_counter()
        table = self.described.table(rows, phase, table)
        if self.serving.whole_blocks and len(phase.due):  # then this is where rounds run
            self._count(time.perf_counter() - begin, 0)
        return table

    # ---- rounds -----------------------------------------------------------------------------------

    def _due(self, rows: Rows, phase: Phase, table: Tensor) -> dict[str, list[LayerMoves]]:
        if not len(phase.due) or self.serving.whole_blocks:
            return {}
        begin = time.perf_counter()
        requests: list[Tracked] = [rows.requests[i] for i in phase.rows[phase.due]]
        numbers = [int(n) - 1 for n in phase.rounds[phase.due]]
        each = self.rounds.plan(requests, numbers, table, [int(row) for row in phase.due])
        self._count(time.perf_counter() - begin, 0)
        return dict(zip(self.layer_names, each, strict=True))

    def _count(self, seconds: float, moved: int) -> None:
        if self._counts:
            self._counters.add("round_seconds", seconds)
            self._counters.add("moved_entries", moved)


def _heads(spec: KeepSpec, layer_names: list[str], vllm_config: VllmConfig) -> Heads:
    """Global numbers of the KV heads that this worker holds."""
    total = vllm_config.model_config.get_total_num_kv_heads()
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    if spec.num_kv_heads != max(1, total // size):  # layers of this model differ
        if size > 1:
            raise Refused(
                f"layer {layer_names[0]} has another number of KV heads than the model says, so ranks cannot tell "
                "which heads are theirs: use --tensor-parallel-size 1"
            )
        total = spec.num_kv_heads
    # With more ranks than KV heads, neighbouring ranks hold copies of the same head, which must draw alike.
    first = rank * spec.num_kv_heads if total >= size else rank * total // size
    layers = torch.tensor([extract_layer_index(name) for name in layer_names])
    return Heads(layers, first + torch.arange(spec.num_kv_heads), total)
