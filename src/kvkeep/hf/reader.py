"""Which tokens of a forward are prompt, which are trace, and which are padding.

A cache is not told where the prompt ends. The rules, first match first:

1. ``prompt_length=`` was given: that many columns are the first prompt.
2. Inside ``cache.as_prompt()`` or ``cache.as_trace()`` a forward is what it says.
3. Before the first trace token: a forward of several tokens is prompt, and so is the very first
   forward whatever its size. The first later forward of one token begins the trace, unless
   ``generate`` has just taken over the cache, or is in the middle of a chunked prefill.
4. After it: a forward of one token is trace. One of several tokens is a new turn if it comes from
   ``generate`` (which asks for ``get_seq_length()`` first), else trace.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import transformers
from packaging.version import Version
from torch import Tensor

from .model import Unsupported

logger = logging.getLogger("kvkeep")

# From this release on, generate marks the cache it was given (`_is_user_defined`).
_GENERATE_MARKS = Version(transformers.__version__) >= Version("5.17.0")


@dataclass(frozen=True)
class Reading:
    """What a forward of q columns feeds.

    Attributes:
        prompt: leading columns that belong to a prompt; the others are trace.
        turn: True if the prompt columns begin or continue a later turn.
        pads: padding columns of each row, all on the left.
    """

    prompt: int
    turn: bool
    pads: list[int]


class Reader:
    """Follows the forwards of one batch.

    Args:
        rows: B.
        prompt_length: columns of the first prompt (padding included), or None to find out.
    """

    def __init__(self, rows: int, prompt_length: int | None) -> None:
        if prompt_length is not None and prompt_length < 1:
            raise ValueError(f"prompt_length must be at least 1, got {prompt_length}")
        self.rows = rows
        self.prompt_length = prompt_length
        self.columns = 0  # before the forward being read
        self.mode: Literal["prompt", "trace"] | None = None
        self.in_trace = False
        self.asked_length = False  # get_seq_length() was called since the last forward
        self.marked = False  # generate took over the cache since the last forward
        self._announced = 0  # columns that a chunked prefill is known to reach
        self._real = [0] * rows  # tokens of each row that were not padding
        self._warned = False

    def read(self, q: int, mask: Tensor | None, positions: Tensor | None = None) -> Reading:
        """Classify a forward.

        Args:
            q: its columns.
            mask: the 2D attention mask, [B, columns + q] or None.
            positions: its position ids, [B or 1, q] or None.

        Raises:
            ValueError: the padding is not on the left, or the mask has another shape.
        """
        self._announce(q, positions)
        pads = self._pads(q, mask)
        prompt, turn = self._prompt_columns(q)
        known = max(self._announced, self.prompt_length or 0)
        ends = prompt < q or (self.columns + q >= known and (self._from_generate(q) or known > 0))
        if ends and not self.in_trace and 0 in [r + prompt - p for r, p in zip(self._real, pads, strict=True)]:
            raise ValueError("a row of the batch has an empty prompt: every row needs at least one token")
        if turn and any(pads):
            raise ValueError("padding inside a later turn is not supported: run rows with unequal turns one by one")
        return Reading(prompt, turn, pads)

    def select(self, order: list[int]) -> None:
        """Keep these rows, in this order."""
        self.rows = len(order)
        self._real = [self._real[i] for i in order]

    def done(self, q: int, reading: Reading) -> None:
        """Move on after the forward has run."""
        self.columns += q
        if not self.in_trace:
            self._real = [r + q - p for r, p in zip(self._real, reading.pads, strict=True)]
        if reading.prompt < q:
            self.in_trace = True

    def _prompt_columns(self, q: int) -> tuple[int, bool]:
        turn = self.in_trace
        if self.mode is not None:
            return (q if self.mode == "prompt" else 0), turn and self.mode == "prompt"
        if not self.in_trace and self.prompt_length is not None:
            return min(q, max(0, self.prompt_length - self.columns)), False
        if self.columns < self._announced:
            return q, turn
        if not self.in_trace:
            return (q if q > 1 or self.columns == 0 or self.marked else 0), False
        if q > 1 and self.asked_length:
            return q, True
        if q > 1 and not self._warned:
            self._warned = True
            logger.warning(
                "a forward of %d tokens after the prompt counts as trace, whose entries can be evicted; "
                "if it is a new turn, run it inside cache.as_prompt()",
                q,
            )
        return 0, False

    def _announce(self, q: int, positions: Tensor | None) -> None:
        """Learn from ``generate`` how long a prefill in chunks will be.

        It hands each chunk a slice of the whole prompt's position ids, whose row stride is the
        prompt's length. Without this, a last chunk of one token would look like the first of the trace.
        """
        if not self._from_generate(q) or positions is None or positions.dim() != 2 or positions.stride(1) != 1:
            return
        full = positions.stride(0)
        whole = positions.untyped_storage().nbytes() // positions.element_size()
        if positions.storage_offset() == self.columns and self.columns + q < full and whole % full == 0:
            self._announced = full

    def _from_generate(self, q: int) -> bool:
        """Whether ``generate`` has just begun a prefill."""
        asked = self.asked_length and (q > 1 or self.columns == 0)
        return self.marked or (asked and not _GENERATE_MARKS)

    def _pads(self, q: int, mask: Tensor | None) -> list[int]:
        if mask is not None and mask.dim() != 2:
            raise ValueError(f"kvkeep needs the 2D mask of padding, got an attention mask of shape {tuple(mask.shape)}")
        known = max(self._announced, self.prompt_length or 0, 1)
        if mask is None or (q == 1 and self.columns >= known and self.mode != "prompt"):
            # A decoding step is not looked at: reading the mask would wait for the device at every token.
            return [0] * self.rows
        if mask.shape[0] != self.rows or mask.shape[1] < self.columns + q:
            raise ValueError(
                f"the attention mask has shape {tuple(mask.shape)}: kvkeep needs the 2D mask of all "
                f"{self.columns + q} columns seen so far, [{self.rows}, {self.columns + q}]"
            )
        new = mask[:, self.columns : self.columns + q].to("cpu").bool().tolist()
        pads = []
        for row, kept in enumerate(new):
            pad = kept.index(True) if True in kept else q
            if pad < q and (not all(kept[pad:]) or (pad and self._real[row])):
                raise ValueError(
                    f"row {row} is padded on the right or in the middle: kvkeep needs left padding "
                    "(tokenizer.padding_side = 'left')"
                )
            if pad == q and self._real[row]:
                raise ValueError(f"row {row} is padded on the right: kvkeep needs left padding")
            pads.append(pad)
        return pads


def refuse_repeats(positions: Tensor | None, seen: Sequence[int]) -> None:
    """A new turn must bring new tokens: transformers 5.17 to 5.19 feed the old ones again in some cases.

    Args:
        positions: the forward's position ids.
        seen: tokens of each row before it.
    """
    if positions is None or positions.dim() != 2:
        return
    first = positions[:, 0].tolist()
    if any(f < n for f, n in zip(first * len(seen), seen, strict=False)):
        raise Unsupported(
            f"a new turn begins at position {min(first)}, but the cache has seen {seen[0]} tokens: "
            "this transformers feeds a later turn's earlier tokens again; call generate without prefill_chunk_size"
        )
