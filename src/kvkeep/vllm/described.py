"""A step as vLLM describes it, but in slots instead of tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from .config import Serving
from .steps import Ints, Phase, Rows
from .transfer import send


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


class Describer:
    """Describes steps and phases to attention kernels.

    Args:
        serving: the engine's settings.
        block_size: slots of a block.
        fixed: memory for steps that may replay a captured graph; None: each step gets its own.
    """

    def __init__(self, serving: Serving, block_size: int, fixed: Fixed | None) -> None:
        self.serving, self.block_size, self.fixed = serving, block_size, fixed
        self._order: tuple[object, bytes, Tensor] | None = None

    def plain(self, common: CommonAttentionMetadata, rows: Rows, lengths: Ints) -> CommonAttentionMetadata | None:
        """The step in slots where no round is due and nothing else is special, as nearly always; else None."""
        if self.fixed is not None:
            return None
        if (lengths <= rows.first).all():
            return common  # no row is full yet: slots are positions
        if common.max_query_len > 1 or common.num_reqs > len(lengths) or self.serving.whole_blocks:
            return None
        slots, due = rows.single(lengths.astype(np.int64) - 1)
        if due.any():
            return None
        blocks, offsets = np.divmod(slots, self.block_size)
        places = common.block_table_tensor.numpy()[np.arange(len(slots)), blocks] * np.int64(self.block_size) + offsets
        held = torch.from_numpy((slots + 1).astype(np.int32))
        return common.replace(
            seq_lens=held,
            seq_lens_cpu_upper_bound=held,
            max_seq_len=int(slots.max()) + 1,
            slot_mapping=torch.from_numpy(places),
            **_DROPPED,
        )

    def whole(self, common: CommonAttentionMetadata, phase: Phase, table: Tensor) -> CommonAttentionMetadata:
        """The step in slots. Padded rows have no entries, padded tokens no slot."""
        fixed = self.fixed or Fixed(common.num_reqs, common.num_actual_tokens, common.seq_lens.device)
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

    def part(self, common: CommonAttentionMetadata, phase: Phase, table: Tensor) -> CommonAttentionMetadata:
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

    def table(self, rows: Rows, phase: Phase, table: Tensor) -> Tensor:
        """Block tables of the phase's rows (of all rows and padding, if it is the whole step) as rounds left them."""
        whole = phase.tokens is None
        if not whole:
            table = table[send(torch.from_numpy(phase.rows), table.device)]
        if not self.serving.whole_blocks:
            return table
        into = self.fixed.table(table).copy_(table) if whole and self.fixed is not None else table.clone()
        index = self._orders(rows, phase, table.device)[:, : table.shape[1]]  # a budget may exceed the model's length
        into[: len(index), : index.shape[1]] = table[: len(index)].gather(1, index)
        return into

    def _orders(self, rows: Rows, phase: Phase, device: torch.device) -> Tensor:
        """Order of each row's blocks, int64 [R, n]; the same until a round runs or the batch changes."""
        state = phase.rows.tobytes() + phase.rounds.tobytes()
        if self._order is None or self._order[0] is not rows or self._order[1] != state:
            each = [
                rows.requests[row].order(int(rounds), self.block_size)
                for row, rounds in zip(phase.rows, phase.rounds, strict=True)
            ]
            order = np.tile(np.arange(max(map(len, each))), (len(each), 1))
            for i, found in enumerate(each):
                order[i, : len(found)] = found
            self._order = rows, state, send(torch.from_numpy(order), device)
        return self._order[2]

    def blank(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """A step without requests in the fixed memory, for capturing graphs and for idle data-parallel engines."""
        assert self.fixed is not None
        lengths, slots = self.fixed.lengths[: common.num_reqs], self.fixed.slots[: common.num_actual_tokens]
        table = common.block_table_tensor
        if self.serving.whole_blocks:
            table = self.fixed.table(table).zero_()
        return common.replace(
            seq_lens=lengths.copy_(common.seq_lens[: common.num_reqs]),
            slot_mapping=slots.fill_(-1),
            block_table_tensor=table,
        )


#: What would describe the step in tokens; no backend of ours asks for it.
_DROPPED: dict[str, None] = {
    "positions": None,
    "is_prefilling": None,
    "_num_computed_tokens_cache": None,
    "_token_to_req_indices_cache": None,
}
