"""What one forward does to the cache: the same for every evicting layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass
class RowMask:
    """Which of the returned entries a forward may see, where rows hold different numbers of entries.

    Attributes:
        valid: bool [B, S], entries that exist.
        queries: number of newest columns among them that are this forward's own tokens and causal
            among each other; 0 for a single query, which sees everything valid.
    """

    valid: Tensor
    queries: int
    _made: dict[tuple[str, torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def for_attention(self, implementation: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The mask in the form an attention implementation takes.

        Returns:
            flash: int64 [B, S], which its wrapper uses to unpad. sdpa: bool [B, 1, q, S].
            eager: additive in ``dtype``, [B, 1, q, S].
        """
        kind = "flash" if "flash" in implementation else "eager" if "eager" in implementation else "sdpa"
        key = (kind, dtype, device)
        if key not in self._made:
            self._made[key] = self._make(kind, dtype, device)
        return self._made[key]

    def _make(self, kind: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        valid = self.valid.to(device)
        if kind == "flash":
            return valid.to(torch.int64)
        seen = valid[:, None, None, :]  # [B, 1, 1, S]
        if self.queries:
            q, total = self.queries, valid.shape[1]
            causal = torch.ones(q, q, dtype=torch.bool, device=device).tril()
            own = torch.cat([causal.new_ones(q, total - q), causal], dim=1)  # [q, S]
            # A padding query sees at least itself: a row without any entry would give NaN.
            itself = torch.cat([causal.new_zeros(q, total - q), torch.eye(q, dtype=torch.bool, device=device)], dim=1)
            seen = (seen & own) | itself
        if kind == "sdpa":
            return seen
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)


@dataclass
class Step:
    """One forward of q columns.

    Attributes:
        columns: q, columns of the forward, padding included.
        starts: slot of each row's first token that is not padding.
        pads: padding columns of each row in this forward, all on the left.
        stored: slots that hold entries before the forward's own are written (the widest row).
        needed: slots the storage must have.
        bound: slots the storage never exceeds once rounds run; None without a budget.
        appended: True if attention gets the stored entries followed by this forward's columns, as
            a copy; False if it gets the slots as they lie.
        mask: what replaces the model's own mask; None keeps the model's.
        unmasked: True if the model's mask must be dropped, since every entry is visible.
        parts: one step for each evicting layer, where these hold different numbers of entries.
    """

    columns: int
    starts: list[int]
    pads: list[int]
    stored: int
    needed: int
    bound: int | None
    appended: bool = False
    mask: RowMask | None = None
    unmasked: bool = False
    parts: Sequence[Step] = ()
    _places: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def places(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Rows and their starting slots as index tensors, int64 [B] each; made once a forward."""
        if device not in self._places:
            starts = torch.tensor(self.starts, device=device)
            self._places[device] = (torch.arange(len(self.starts), device=device), starts)
        return self._places[device]

    def part(self, index: int) -> Step:
        """The step of one evicting layer."""
        return self.parts[index] if self.parts else self

    def written(self) -> list[tuple[int | slice, slice, slice]]:
        """Row (or all), heads and slots that the forward fills, as indices into ``[B, H, S, ...]``."""
        if self.uniform:
            return [(slice(None), slice(None), slice(self.starts[0], self.starts[0] + self.columns))]
        pairs = enumerate(zip(self.starts, self.pads, strict=True))
        return [(i, slice(None), slice(start, start + self.columns - pad)) for i, (start, pad) in pairs]

    @property
    def width(self) -> int:
        """Entries that ``update`` returns."""
        return self.stored + self.columns if self.appended else self.needed

    @cached_property
    def uniform(self) -> bool:
        """Whether every row writes its whole forward to the same slots."""
        return not any(self.pads) and min(self.starts) == max(self.starts)
