"""One layer's entries: allocated once, written in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from .model import Unsupported
from .step import Step

_LEAST_GROWTH = 128  # slots


class EvictingLayer(DynamicLayer):
    """Keys and values of one attention layer, ``[B, H, S, D]`` each, S slots of which some are filled.

    Args:
        number: global layer number.
        heads: H, as the model's configuration says.
        step: gives the forward that is under way, None between forwards.
        columns: gives the number of columns seen so far, padding included.
        numbers: float32 numbers kept beside each entry, for what a policy wants to know of it.
    """

    is_croppable = False

    def __init__(
        self, number: int, heads: int, step: Callable[[], Step | None], columns: Callable[[], int], numbers: int = 0
    ) -> None:
        super().__init__()
        self.number, self.heads, self._numbers = number, heads, numbers
        self.beside: Tensor | None = None  # float32 [B, H, S, numbers]
        self.stored: Step | None = None  # the last forward that stored its entries here
        self._step, self._columns = step, columns
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    # ---- what transformers calls ----------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store a forward's entries ``[B, H, q, D]`` and return those its attention may see."""
        step = self._step()
        if step is None:
            raise RuntimeError(
                "the cache was updated outside a forward of its model: it works only with the model it was made for, "
                "and only until evict() ends or close() is called"
            )
        if key_states.shape[1] != self.heads:
            raise Unsupported(
                f"layer {self.number} has {key_states.shape[1]} KV heads, the model's configuration says {self.heads}"
            )
        self.reserve(step, key_states, value_states)
        assert self.k is not None
        assert self.v is not None
        if self._numbers:
            self._write_beside(step, slice(None), None)
        seen = self._store(step, self.k, key_states), self._store(step, self.v, value_states)
        self.keys, self.values = self.k[:, :, : step.needed], self.v[:, :, : step.needed]
        self.stored = step
        return seen

    def get_seq_length(self) -> int:
        """Tokens seen, padding included: what positions are counted from. Not the entries that are left."""
        return self._columns()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Entries the next forward sees, and the column that the first of them stands for."""
        step, seen = self._step(), self._columns()
        width = seen + query_length if step is None else min(step.width, seen + query_length)
        return width, seen + query_length - width

    def reset(self) -> None:
        self.k = self.v = self.beside = self.stored = None
        super().reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.k is not None:
            self.select_rows(torch.arange(self.k.shape[0]).repeat_interleave(repeats))

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise Unsupported("a bounded cache cannot take tokens back (crop): evicted entries are gone")

    # ---- storage --------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Slots allocated."""
        return 0 if self.k is None else self.k.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(t.untyped_storage().nbytes() for t in (self.k, self.v) if t is not None)

    @property
    def beside_nbytes(self) -> int:
        """Bytes allocated for the numbers beside the entries."""
        return 0 if self.beside is None else self.beside.untyped_storage().nbytes()

    def reserve(self, step: Step, keys: Tensor, values: Tensor) -> None:
        """Make room for a forward: in steps until K + r is reached, then (unless K grows) never again."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        if step.needed > self.capacity:
            grown = max(step.needed + _LEAST_GROWTH, step.needed * 17 // 16)
            slots = grown if step.bound is None else max(min(grown, step.bound), step.needed)
            self.resize(slots, keys, values)

    def resize(self, slots: int, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        """Give the storage ``slots`` slots; what fits is kept. One tensor after the other, to keep the peak low."""
        keys = self.k if keys is None else keys
        values = self.v if values is None else values
        if keys is None or values is None or slots == self.capacity:
            return
        self.k = self._resized(self.k, keys, slots)
        self.v = self._resized(self.v, values, slots)
        if self._numbers:
            like = torch.empty((*keys.shape[:3], self._numbers), device=keys.device)
            self.beside = self._resized(self.beside, like, slots)

    @staticmethod
    def _resized(old: Tensor | None, like: Tensor, slots: int) -> Tensor:
        shape = (like.shape[0], like.shape[1], slots, like.shape[3])
        # Zeros, since a masked slot is still multiplied. Never an inference tensor: the cache outlives the mode.
        with torch.inference_mode(False):
            new = torch.zeros(shape, dtype=like.dtype, device=like.device)
        if old is not None:
            common = min(slots, old.shape[2])
            new[:, :, :common] = old[:, :, :common]
        return new

    def select_rows(self, rows: Tensor) -> None:
        """Keep these batch rows, in this order."""
        if self.k is not None and self.v is not None:
            with torch.inference_mode(False):
                rows = rows.clone()
                self.k = self.k.index_select(0, rows.to(self.k.device))
                self.v = self.v.index_select(0, rows.to(self.v.device))
                if self.beside is not None:
                    self.beside = self.beside.index_select(0, rows.to(self.beside.device))

    # ---- numbers beside the entries ---------------------------------------------------------------

    def note(self, step: Step, column: int, values: Tensor) -> None:
        """Write a number beside each entry that a forward stored.

        Args:
            step: that forward, as this layer saw it.
            column: which number.
            values: [B, q], one a column of the forward.
        """
        self._write_beside(step, column, values)

    def receive(self, step: Step, column: int, weights: Tensor) -> None:
        """Add to a number of everything that the forward under way could see.

        Args:
            step: that forward, as this layer sees it.
            column: which number.
            weights: float32 [B, H, S], of what :meth:`update` returned.
        """
        assert self.beside is not None
        if not step.appended:
            self.beside[:, :, : weights.shape[-1], column] += weights
            return
        self.beside[:, :, : step.stored, column] += weights[..., : step.stored]
        for (row, heads, slots), pad in zip(step.written(), step.pads, strict=False):
            self.beside[row, heads, slots, column] += weights[row, ..., step.stored + pad :]

    def _write_beside(self, step: Step, column: int | slice, values: Tensor | None) -> None:
        """``values`` [B, q], or zeros, beside the entries that a forward stores."""
        assert self.beside is not None
        if values is None:
            values = torch.zeros(len(step.pads), step.columns, device=self.beside.device)
        new = values.to(self.beside.device, torch.float32)[:, None, :, None]  # [B, 1, q, 1]
        one = slice(column, column + 1) if isinstance(column, int) else column
        if step.columns == 1 and not step.uniform:
            rows, slots = step.places(self.beside.device)
            self.beside[rows, :, slots, one] = new[:, :, 0]
            return
        for (row, heads, slots_of_row), pad in zip(step.written(), step.pads, strict=False):
            self.beside[row, heads, slots_of_row, one] = new[row, ..., pad:, :]

    @staticmethod
    def _store(step: Step, storage: Tensor, new: Tensor) -> Tensor:
        """Write ``new`` [B, H, q, D] into its slots; return what attention sees."""
        new = new.detach()  # inference only: evicted entries have no gradient
        seen = storage[:, :, : step.stored] if step.appended else storage[:, :, : step.needed]
        if step.appended:
            # Copied before the write: a new turn's slots lie among the stored ones.
            seen = torch.cat([seen, new], dim=2) if step.stored else new
        if step.uniform:
            start = step.starts[0]
            storage[:, :, start : start + step.columns] = new
        elif step.columns == 1:
            rows, slots = step.places(storage.device)
            storage[rows, :, slots] = new[:, :, 0]
        else:
            for row, (start, pad) in enumerate(zip(step.starts, step.pads, strict=True)):
                storage[row, :, start : start + step.columns - pad] = new[row, :, pad:]
        return seen
