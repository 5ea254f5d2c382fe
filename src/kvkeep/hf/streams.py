"""Which stream each row draws from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ..draws import stream_of


class Streams:
    """Collects the prompts' ids and turns them into streams when the first round needs them.

    Args:
        samples: sample number of each row; None numbers rows with equal prompts by occurrence.
    """

    def __init__(self, samples: Sequence[int] | None) -> None:
        self._samples = samples
        self._chunks: list[tuple[Tensor, list[int]]] = []
        self._shared = False
        self._made: Tensor | None = None

    def add(self, ids: Tensor, pads: list[int]) -> None:
        """Note a chunk of the first prompt, ``ids`` [B, q] with ``pads`` padding columns on the left of each row."""
        self._chunks.append((ids.detach().clone(), pads))

    def check(self, rows: int) -> None:
        """Refuse sample numbers that are not one a row."""
        if self._samples is not None and len(self._samples) != rows:
            raise ValueError(f"samples has {len(self._samples)} numbers for a batch of {rows} rows: give one a row")

    def share(self) -> None:
        """Rows with equal prompts are beams of one request: they share a stream."""
        self._shared = self._shared or self._made is None

    def select(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        whole = len(set(order)) == len(order)  # copies of a row are numbered anew
        if self._samples is None and not self._shared and self._chunks and whole:
            self._samples = self._numbers([self._prompt(i) for i in range(len(self._chunks[0][1]))])
        self._chunks = [(ids[list(order)], [pads[i] for i in order]) for ids, pads in self._chunks]
        if self._samples is not None:
            self._samples = [self._samples[i] for i in order]
        if self._made is not None:
            self._made = self._made[list(order)]

    def get(self, rows: int) -> Tensor:
        """int64 [B] on the CPU."""
        if self._made is None:
            prompts = [self._prompt(i) for i in range(rows)]
            self._made = torch.tensor(
                [stream_of(p, s) for p, s in zip(prompts, self._numbers(prompts), strict=True)], dtype=torch.int64
            )
        return self._made

    def of_context(self, rows: int) -> Tensor:
        """int64 [B] on the CPU: streams of what has been fed so far, while more of the prompt is to come.

        Rows with equal contexts draw alike unless sample numbers were given: what stays of a context depends neither on
        the question nor on the batch.
        """
        numbers = self._samples if self._samples is not None else [0] * rows
        return torch.tensor([stream_of(self._prompt(i), s) for i, s in enumerate(numbers)], dtype=torch.int64)

    def _prompt(self, row: int) -> tuple[int, ...]:
        return tuple(token for ids, pads in self._chunks for token in ids[row, pads[row] :].tolist())

    def _numbers(self, prompts: Sequence[tuple[int, ...]]) -> list[int]:
        if self._samples is not None:
            return list(self._samples)
        seen: Counter[tuple[int, ...]] = Counter()
        numbers = []
        for prompt in prompts:
            numbers.append(0 if self._shared else seen[prompt])
            seen[prompt] += 1
        return numbers
