"""What every attention backend does with a step: cut it into phases, run rounds, address slots instead of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import CommonAttentionMetadata

from .counters import Counters
from .layouts import Layout
from .requests import Tracked
from .rounds import LayerMoves, Rounds
from .spec import KeepSpec
from .steps import Phase, Rows
from .tap import RequestTap, tap_of
from .views import Heads

M = TypeVar("M")


@dataclass
class Part(Generic[M]):
    """A phase, ready for the attention kernels.

    Attributes:
        meta: what the backend's own kernels want to know of it.
        tokens: int64 indices of its tokens in the batch; None: all of them.
        moves: what moves in each layer before its tokens are written there.
        layout: of the caches.
    """

    meta: M
    tokens: Tensor | None
    moves: Mapping[str, list[LayerMoves]]
    layout: Layout

    def move(self, layer: str, cache: Tensor) -> None:
        """Run the rounds that are due in this layer."""
        for moves in self.moves.get(layer, ()):
            moves.run(self.layout, cache)


@dataclass
class KeepMetadata(Generic[M]):
    """Attention metadata of a step: its parts, in order."""

    parts: list[Part[M]] = field(default_factory=list)


class Keeper:
    """Cuts steps for the layers that share a block table and a metadata builder.

    Args:
        spec: their cache.
        layer_names: vLLM's names of the layers.
        vllm_config: the engine's configuration.
        layout: how the caches lie in memory.
    """

    def __init__(self, spec: KeepSpec, layer_names: list[str], vllm_config: VllmConfig, layout: Layout) -> None:
        self.serving, self.block_size, self.layout = spec.serving, spec.block_size, layout
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
        self, common: CommonAttentionMetadata, build: Callable[[CommonAttentionMetadata], M]
    ) -> Iterator[Part[M]]:
        """Cut a step; rounds due before its first tokens run at once, in all layers.

        Args:
            common: vLLM's description of the step, in tokens.
            build: makes the backend's own metadata of a description in slots.
        """
        rows = self._known_rows(common)
        if rows is None:  # a dummy step, which serves no request
            yield Part(build(common), None, {}, self.layout)
            return
        count = len(rows.requests)
        starts = common.query_start_loc_cpu[: count + 1].numpy().astype(np.int64)
        seen = common.seq_lens_cpu_upper_bound
        lengths = (common.seq_lens.cpu() if seen is None else seen)[:count].numpy().astype(np.int64)
        for number, phase in enumerate(rows.phases(starts, lengths - np.diff(starts))):
            table = self._table(rows, phase, common.block_table_tensor)
            moves = self._due(rows, phase, table)
            if number == 0:
                self._run(moves)
                moves = {}
            tokens = None if phase.tokens is None else torch.from_numpy(phase.tokens).to(common.seq_lens.device)
            yield Part(build(self._described(common, phase, table)), tokens, moves, self.layout)

    # ---- rows -------------------------------------------------------------------------------------

    def _known_rows(self, common: CommonAttentionMetadata) -> Rows | None:
        known = self.tap.rows
        if not known:
            return None
        if any(r is None for r in known) or len(known) > common.num_reqs:
            raise RuntimeError(f"the batch has {common.num_reqs} rows, and kvkeep's tap knows {len(known)} of them")
        requests = [r for r in known if r is not None]
        if len(requests) != len(self._rows.requests) or any(
            a is not b for a, b in zip(requests, self._rows.requests, strict=True)
        ):
            self._rows = Rows(requests)
        return self._rows

    def _table(self, rows: Rows, phase: Phase, table: Tensor) -> Tensor:
        """Block tables of the phase's rows as rounds left them, int32 [R, B]."""
        if len(phase.rows) < table.shape[0]:
            table = table[torch.from_numpy(phase.rows).to(table.device)]
        if not self.serving.whole_blocks:
            return table
        table = table.clone()
        for i, (row, rounds) in enumerate(zip(phase.rows, phase.rounds, strict=True)):
            if rounds:
                order = torch.from_numpy(rows.requests[row].order(int(rounds), self.block_size)).to(table.device)
                table[i, : len(order)] = table[i, order]
        return table

    # ---- rounds -----------------------------------------------------------------------------------

    def _due(self, rows: Rows, phase: Phase, table: Tensor) -> dict[str, list[LayerMoves]]:
        if not len(phase.due) or self.serving.whole_blocks:
            return {}
        begin = time.perf_counter()
        requests: list[Tracked] = [rows.requests[i] for i in phase.rows[phase.due]]
        numbers = [int(n) - 1 for n in phase.rounds[phase.due]]
        each = self.rounds.plan(requests, numbers, table[torch.from_numpy(phase.due).to(table.device)])
        self._count(time.perf_counter() - begin, 0)
        return dict(zip(self.layer_names, each, strict=True))

    def _run(self, moves: Mapping[str, list[LayerMoves]]) -> None:
        if not moves:
            return
        begin, moved = time.perf_counter(), 0
        context = self._config.compilation_config.static_forward_context
        for name, each in moves.items():
            for part in each:
                part.run(self.layout, context[name].kv_cache)
                moved += len(part.heads)
        self._count(time.perf_counter() - begin, moved)

    def _count(self, seconds: float, moved: int) -> None:
        if self._counts:
            self._counters.add("round_seconds", seconds)
            self._counters.add("moved_entries", moved)

    # ---- in slots ---------------------------------------------------------------------------------

    def _described(self, common: CommonAttentionMetadata, phase: Phase, table: Tensor) -> CommonAttentionMetadata:
        """The phase as vLLM describes steps, in slots."""
        device = common.seq_lens.device
        blocks, offsets = np.divmod(phase.slots, self.block_size)
        owner, block, offset = (torch.from_numpy(x).to(device) for x in (phase.owners, blocks, offsets))
        slots = table[owner, block].to(torch.int64) * self.block_size + offset
        starts = torch.from_numpy(phase.starts.astype(np.int32))
        lengths = torch.from_numpy(phase.lengths.astype(np.int32))
        return common.replace(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(device),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(phase.rows),
            num_actual_tokens=int(phase.starts[-1]),
            max_query_len=int(np.diff(phase.starts).max(initial=0)),
            max_seq_len=int(phase.lengths.max(initial=0)),
            block_table_tensor=table,
            slot_mapping=slots,
            positions=None,
            is_prefilling=None,
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )


def _heads(spec: KeepSpec, layer_names: list[str], vllm_config: VllmConfig) -> Heads:
    """Global numbers of the KV heads that this worker holds."""
    total = vllm_config.model_config.get_total_num_kv_heads()
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    # With more ranks than KV heads, neighbouring ranks hold copies of the same head, which must draw alike.
    first = rank * spec.num_kv_heads if total >= size else rank * total // size
    layers = torch.tensor([extract_layer_index(name) for name in layer_names])
    return Heads(layers, first + torch.arange(spec.num_kv_heads), total)
