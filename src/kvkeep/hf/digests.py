"""A policy's own summary of all queries before RoPE, made block by block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..policies import Policy
from ..rotary import Rotary


class Digests:
    """Feeds :meth:`kvkeep.policies.Policy.digest`, layer by layer.

    Prompt blocks lie at fixed positions of each row, whatever chunks and padding it came in; trace blocks count from
    the first token of the trace. So a digest does not depend on the batch or on chunks.

    Args:
        policy: whose digest it is.
        rotary: to take the rotation back.
        rows: B.
    """

    def __init__(self, policy: Policy, rotary: Rotary, rows: int) -> None:
        self.policy, self.rotary, self.rows = policy, rotary, rows
        self.prompt_block, self.trace_block = policy.digest_blocks
        self._states: dict[int, list[Tensor | None]] = {}  # layer -> [1, ...] of each row, while there is a prompt
        self._waiting: dict[int, list[list[Tensor]]] = {}  # layer -> row -> [1, H_q, n, D] of less than a block
        self._at: dict[int, list[int]] = {}  # layer -> row -> position of the first that waits
        self._state: dict[int, Tensor] = {}  # layer -> [B, ...], once the trace has begun
        self._tail: dict[
            int, list[tuple[Tensor, Tensor]]
        ] = {}  # layer -> [B, H_q, n, D] and positions, less than a block

    # ---- the prompt -----------------------------------------------------------------------------

    def add_prompt(self, layer: int, queries: Tensor, pads: Sequence[int]) -> None:
        """Take prompt queries [B, H_q, q, D] after RoPE, of which ``pads`` columns a row are padding."""
        self._open(layer)
        states = self._states.setdefault(layer, [None] * self.rows)
        waiting = self._waiting.setdefault(layer, [[] for _ in range(self.rows)])
        at = self._at.setdefault(layer, [0] * self.rows)
        for row, pad in enumerate(pads):
            new = queries[row : row + 1, :, pad:]
            while new.shape[2]:
                held = sum(part.shape[2] for part in waiting[row])
                part, new = new.split([n := min(self.prompt_block - held, new.shape[2]), new.shape[2] - n], dim=2)
                waiting[row].append(part.clone())  # a slice would hold on to the whole chunk
                if held + n == self.prompt_block:
                    self._flush(states, waiting, at, row)

    def _flush(self, states: list[Tensor | None], waiting: list[list[Tensor]], at: list[int], row: int) -> None:
        if waiting[row]:
            queries = torch.cat(waiting[row], dim=2)
            positions = torch.arange(at[row], at[row] + queries.shape[2], device=queries.device)[None]
            states[row] = self._digest(states[row], queries, positions)
            waiting[row], at[row] = [], at[row] + queries.shape[2]

    def _digest(self, state: Tensor | None, queries: Tensor, positions: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return self.policy.digest(state, self.rotary.unrotate(queries.clone(), positions[:, None]), positions)

    def _open(self, layer: int) -> None:
        """More of the prompt follows a context whose digest was asked for."""
        if layer in self._state:
            state = self._state.pop(layer)
            self._states[layer] = [state[row : row + 1] for row in range(self.rows)]
            self._waiting[layer] = [[] for _ in range(self.rows)]

    def _close(self, layer: int) -> None:
        """The prompt has ended: what waits is its last block."""
        if layer in self._state or layer not in self._states:
            return
        states = self._states.pop(layer)
        waiting, at = self._waiting.pop(layer), self._at[layer]
        for row in range(self.rows):
            self._flush(states, waiting, at, row)
        self._state[layer] = torch.cat([state for state in states if state is not None])

    # ---- the trace ------------------------------------------------------------------------------

    def add_trace(self, layer: int, queries: Tensor, positions: Tensor) -> None:
        """Take trace queries [B, H_q, q, D] after RoPE at ``positions`` int64 [B, q]."""
        self._close(layer)
        if self.trace_block is None:
            return
        tail = self._tail.setdefault(layer, [])
        while queries.shape[2]:
            n = min(self.trace_block - self.pending(layer), queries.shape[2])
            part, queries = queries.split([n, queries.shape[2] - n], dim=2)
            at, positions = positions.split([n, positions.shape[1] - n], dim=1)
            tail.append((part.detach().clone(), at.clone()))  # slices would hold on to the whole forward
            if self.pending(layer) == self.trace_block:
                block, places = (
                    torch.cat(parts, dim=i) for parts, i in zip(zip(*tail, strict=True), (2, 1), strict=True)
                )
                self._state[layer] = self._digest(self._state[layer], block, places)
                tail.clear()

    def pending(self, layer: int) -> int:
        """Newest queries that are not in the digest yet."""
        return sum(part.shape[2] for part, _ in self._tail.get(layer, []))

    def get(self, layer: int, rows: Sequence[int]) -> Tensor:
        """[R, ...], the digest of these rows as it stands."""
        self._close(layer)
        state = self._state[layer]
        return state if list(rows) == list(range(len(state))) else state[list(rows)]

    # ---- upkeep ---------------------------------------------------------------------------------

    def select(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        order = list(order)
        self.rows = len(order)
        for layer in self._states:
            self._states[layer] = [self._states[layer][i] for i in order]
            self._waiting[layer] = [list(self._waiting[layer][i]) for i in order]
        self._at = {layer: [at[i] for i in order] for layer, at in self._at.items()}
        self._state = {layer: state[order] for layer, state in self._state.items()}
        self._tail = {layer: [(q[order], at[order]) for q, at in parts] for layer, parts in self._tail.items()}

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        tensors = [s for states in self._states.values() for s in states if s is not None]
        tensors += [part for rows in self._waiting.values() for row in rows for part in row]
        tensors += [*self._state.values(), *(t for parts in self._tail.values() for part in parts for t in part)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
