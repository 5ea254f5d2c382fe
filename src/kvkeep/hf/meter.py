"""What each row of a batch held and cost, forward by forward, and the budget asserted at each."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from operator import gt
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from .cache import EvictCache


_BUG = "{} a head, but budget and buffer are {}: this is a bug of kvkeep, and what was measured does not count"


class Meter:
    """Follows one request of a cache: call :meth:`note` after each of its forwards.

    It reads plain numbers of the rows, never the device. Bytes are measured again only where they can have changed:
    when a round ran, when the storage grew, and always where sliding-window layers, which move their tensors at
    every token, lie beside the evicting ones.

    Args:
        cache: before its first forward.
    """

    def __init__(self, cache: EvictCache) -> None:
        self.cache = cache
        self._seen = 0
        self._tokens = array("i")  # [F], tokens of each forward; the prompt counts as one
        self._bytes = array("q")  # [F]
        self._entries = array("i")  # [F, R], after each forward
        self._rounds = array("i")  # [F, R]
        self._last: tuple[list[int], list[int]] = ([], [])  # events of the rows, slots of the layers
        self._limits: list[int] = []  # K + r of each row
        self._sliding = len(cache.layers) > len(cache.evicting)

    def note(self) -> None:
        """Account for the forward that has just ended.

        Raises:
            RuntimeError: a row holds more than its K + r entries, or a layer has more slots than the widest row's.
        """
        rows = self.cache.rows
        entries, rounds = [row.cached for row in rows], [row.trace_rounds for row in rows]
        first, prompt, seen = not self._tokens, self.cache.in_prompt, rows[0].seen
        state = [row.rounds for row in rows], [layer.capacity for layer in self.cache.evicting]
        changed = first or prompt or self._sliding or state != self._last
        if changed:
            # A prompt that is not protected may be longer than K + r: it is held whole until the first round.
            self._limits = [
                sys.maxsize if row.limit is None else max(row.limit, row.prompt_length if prompt else 0) for row in rows
            ]
        if any(map(gt, entries, self._limits)):
            row = next(i for i, (held, most) in enumerate(zip(entries, self._limits, strict=True)) if held > most)
            raise RuntimeError(_BUG.format(f"row {row} holds {entries[row]} entries", self._limits[row]))
        if changed:
            self._assert_storage()
        self._last = state
        self._bytes.append(int(self.cache.stats()["bytes"]["now"]) if changed else self._bytes[-1])
        self._tokens.append(1 if first else 0 if prompt else seen - self._seen)  # the whole prompt predicts one
        self._entries.extend(entries)
        self._rounds.extend(rounds)
        self._seen = seen

    def _assert_storage(self) -> None:
        """Rows are counted in plain numbers; this is what the layers really allocated."""
        rows = self.cache.rows
        for i, layer in enumerate(self.cache.evicting):
            most = max(limit + row.at_layer(i).shift for limit, row in zip(self._limits, rows, strict=True))
            most += self.cache.settings.buffer if self.cache.policy.splits else 0  # see Rounds.shrink
            if layer.capacity > most:
                raise RuntimeError(_BUG.format(f"layer {layer.number} has {layer.capacity} slots", most))

    # ---- afterwards -----------------------------------------------------------------------------

    def complete(self, length: int) -> bool:
        """Whether every token of a trace of ``length`` tokens has been predicted."""
        return sum(self._tokens) == length

    def rounds(self) -> Tensor:
        """int32 [R, F], rounds that had run when each token of the traces was predicted."""
        return torch.from_numpy(self._matrix(self._rounds)[self._forwards()].T.astype(np.int32))

    def stats(self, lengths: Sequence[int]) -> list[dict[str, Any]]:
        """Each row's stats as they stood at its own end, which need not be the batch's.

        Args:
            lengths: tokens of each row's trace (its last one was predicted, and never cached).

        Returns:
            :meth:`EvictCache.stats` with the row's own numbers, ``batch`` (its rows), and mean and peak of entries
            and bytes. Forwards of several tokens count as that many, so that entries do not depend on the chunks;
            ``bytes`` stay those of the whole batch at its end.
        """
        found, last = self.cache.stats(), self._forwards()
        tokens = np.asarray(self._tokens)
        behind = tokens.cumsum()[last] - 1 - np.arange(len(last))  # tokens of the same forward that came later
        entries = self._matrix(self._entries)[last] - behind[:, None]  # [F, R]
        rounds, nbytes = self._matrix(self._rounds)[last], np.asarray(self._bytes)[last] / len(lengths)
        return [
            {
                **{k: v[i] if isinstance(v, list) else v for k, v in found.items()},
                **self._at_end(i, n, int(entries[n - 1, i]), int(rounds[n - 1, i])),
                "batch": len(lengths),
                "mean_entries": float(entries[:n, i].mean()),
                "peak_entries": int(entries[:n, i].max()),
                "mean_bytes": float(nbytes[:n].mean()),
                "peak_bytes": float(nbytes[:n].max()),
            }
            for i, n in enumerate(lengths)
        ]

    def _at_end(self, i: int, length: int, entries: int, rounds: int) -> dict[str, Any]:
        row = self.cache.rows[i]
        seen = row.prompt_length + length - 1
        budget = None if row.budget is None else row.budget.kept(max(rounds - 1, 0))
        return {"seen": seen, "entries": entries, "evicted": seen - entries, "rounds": rounds, "budget": budget}

    def _matrix(self, values: array[int]) -> NDArray[np.int_]:
        return np.asarray(values, dtype=np.int64).reshape(len(self._tokens), -1)

    def _forwards(self) -> NDArray[np.int_]:
        """The forward that brought each token, one number a token."""
        return np.repeat(np.arange(len(self._tokens)), np.asarray(self._tokens))
