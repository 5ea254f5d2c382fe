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
from .steps import Ints, Phase, Rows
from .tap import RequestTap, tap_of
from .transfer import send
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

    @classmethod
    def whole(cls, meta: M, layout: Layout) -> KeepMetadata[M]:
        """One part in which nothing moves."""
        return cls([Part(meta, None, {}, layout)])


class Fixed:
    """Where steps of one phase are described when they may replay a captured CUDA graph: always the same memory.

    Args:
        rows: most rows of a batch, padding included.
        tokens: most tokens of a batch, padding included.
        device: where the attention runs.
    """

    def __init__(self, rows: int, tokens: int, device: torch.device) -> None:
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        self.slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        self._table: Tensor | None = None

    def table(self, like: Tensor) -> Tensor:
        """Rows of an own block table, as many and as wide as vLLM's; made when first asked for."""
        if self._table is None:
            self._table = like.new_zeros(len(self.lengths), like.shape[1])
        return self._table[: like.shape[0]]


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
        self._fixed = fixed
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
        if self._fixed is None and bool((seen[:count].numpy() <= rows.first).all()):
            # No row is full yet: slots are positions, and vLLM's own description holds.
            yield from KeepMetadata.whole(build(common, True), self.layout).parts
            return
        starts = common.query_start_loc_cpu[: count + 1].numpy().astype(np.int64)
        computed = seen[:count].numpy().astype(np.int64) - np.diff(starts)
        for number, phase in enumerate(rows.phases(starts, computed)):
            whole = phase.tokens is None
            table = self._table(rows, phase, common.block_table_tensor)
            moves = self._due(rows, phase, table)
            if number == 0:
                self._run(moves)
                moves = {}
            tokens = None if phase.tokens is None else send(torch.from_numpy(phase.tokens), table.device)
            described = self._as_whole(common, phase, table) if whole else self._as_part(common, phase, table)
            yield Part(build(described, whole), tokens, moves, self.layout)

    def blank(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """A step without requests in the fixed memory, for capturing graphs and for idle data-parallel engines."""
        assert self._fixed is not None
        lengths, slots = self._fixed.lengths[: common.num_reqs], self._fixed.slots[: common.num_actual_tokens]
        table = common.block_table_tensor
        if self.serving.whole_blocks:
            table = self._fixed.table(table).zero_()
        return common.replace(
            seq_lens=lengths.copy_(common.seq_lens[: common.num_reqs]),
            slot_mapping=slots.fill_(-1),
            block_table_tensor=table,
        )

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
        """Block tables of the phase's rows (of all rows and padding, if it is the whole step) as rounds left them."""
        whole = phase.tokens is None
        if not whole:
            table = table[send(torch.from_numpy(phase.rows), table.device)]
        if not self.serving.whole_blocks:
            return table
        into = self._fixed.table(table).copy_(table) if whole and self._fixed is not None else table.clone()
        orders = {
            i: rows.requests[row].order(int(rounds), self.block_size)
            for i, (row, rounds) in enumerate(zip(phase.rows, phase.rounds, strict=True))
            if rounds
        }
        if orders:
            width = max(map(len, orders.values()))
            order = np.tile(np.arange(width), (len(phase.rows), 1))
            for i, found in orders.items():
                order[i, : len(found)] = found
            index = send(torch.from_numpy(order), table.device)
            into[: len(order), :width] = table[: len(order)].gather(1, index)
        return into

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

    def _as_whole(self, common: CommonAttentionMetadata, phase: Phase, table: Tensor) -> CommonAttentionMetadata:
        """The step in slots. Padded rows have no entries, padded tokens no slot."""
        fixed = self._fixed or Fixed(common.num_reqs, common.num_actual_tokens, common.seq_lens.device)
        real = len(phase.slots)
        slots, lengths = fixed.slots[: common.num_actual_tokens], fixed.lengths[: common.num_reqs]
        known = np.zeros(common.num_reqs, dtype=np.int64)
        known[: len(phase.lengths)] = phase.lengths
        lengths.copy_(self._place(phase, table, known, slots[:real]))
        slots[real:].fill_(-1)
        return common.replace(
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=torch.from_numpy(known.astype(np.int32)),
            max_seq_len=int(phase.lengths.max()),
            block_table_tensor=table,
            slot_mapping=slots,
            **_DROPPED,
        )

    def _as_part(self, common: CommonAttentionMetadata, phase: Phase, table: Tensor) -> CommonAttentionMetadata:
        """One of several phases, in slots."""
        starts = torch.from_numpy(phase.starts.astype(np.int32))
        slots = torch.empty(len(phase.slots), dtype=torch.int64, device=table.device)
        lengths = self._place(phase, table, phase.lengths, slots)
        return common.replace(
            query_start_loc=send(starts, table.device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(torch.int32),
            seq_lens_cpu_upper_bound=torch.from_numpy(phase.lengths.astype(np.int32)),
            num_reqs=len(phase.rows),
            num_actual_tokens=len(phase.slots),
            max_query_len=int(np.diff(phase.starts).max()),
            max_seq_len=int(phase.lengths.max()),
            block_table_tensor=table,
            slot_mapping=slots,
            **_DROPPED,
        )

    def _place(self, phase: Phase, table: Tensor, lengths: Ints, slots: Tensor) -> Tensor:
        """Fill in the slots of a phase's tokens as kernels count them, int64 [T].

        Returns:
            The lengths on the table's device, int64: they travel in the same copy.
        """
        blocks, offsets = np.divmod(phase.slots, self.block_size)
        packed = torch.from_numpy(np.concatenate([phase.owners * table.shape[1] + blocks, offsets, lengths]))
        places, offset, there = send(packed, table.device).split([len(blocks), len(blocks), len(lengths)])
        torch.add(offset, table.take(places), alpha=self.block_size, out=slots)
        return there


#: What would describe the step in tokens; no backend of ours asks for it.
_DROPPED: dict[str, None] = {
    "positions": None,
    "is_prefilling": None,
    "_num_computed_tokens_cache": None,
    "_token_to_req_indices_cache": None,
}


def _heads(spec: KeepSpec, layer_names: list[str], vllm_config: VllmConfig) -> Heads:
    """Global numbers of the KV heads that this worker holds."""
    total = vllm_config.model_config.get_total_num_kv_heads()
    rank, size = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    # With more ranks than KV heads, neighbouring ranks hold copies of the same head, which must draw alike.
    first = rank * spec.num_kv_heads if total >= size else rank * total // size
    layers = torch.tensor([extract_layer_index(name) for name in layer_names])
    return Heads(layers, first + torch.arange(spec.num_kv_heads), total)
