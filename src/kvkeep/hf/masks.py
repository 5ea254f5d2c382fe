"""Entries that a probe or a pin forces to stay or to go."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import Row
from ..plan import Overrides


class Masks:
    """``keep`` and ``forget`` masks by (row, layer, head, position), and pinned ranges.

    Args:
        layers: L, evicting layers of the model.
        heads: H, KV heads of a layer.
        pins: half-open ranges of positions that are never evicted.
        unit: slots that the policy evicts together; masks need 1.
    """

    def __init__(self, layers: int, heads: int, pins: Sequence[tuple[int, int]], unit: int) -> None:
        self.layers, self.heads, self.pins, self.unit = layers, heads, pins, unit
        self.keep: Tensor | None = None
        self.forget: Tensor | None = None
        self._given: tuple[Tensor | None, Tensor | None] = (None, None)

    def __bool__(self) -> bool:
        return bool(self.pins) or self.per_head

    @property
    def per_head(self) -> bool:
        """Whether heads may be told apart, so that positions must be known for each."""
        return self.keep is not None or self.forget is not None

    def set(self, keep: Tensor | None, forget: Tensor | None) -> None:
        """Use these masks, bool [B, L, H, T]; any axis but the last may be 1.

        Raises:
            ValueError: a mask has another shape or type.
        """
        self.put_back(keep, forget)
        self.check_rows(None)

    def put_back(self, keep: Tensor | None, forget: Tensor | None) -> None:
        """Use masks that were checked before."""
        self._given = self.keep, self.forget = keep, forget

    def check_rows(self, rows: int | None) -> None:
        """Refuse masks that do not fit a batch of ``rows`` rows (None: not known yet)."""
        for mask in (self.keep, self.forget):
            if mask is None:
                continue
            wanted = ("rows" if rows is None else rows, self.layers, self.heads)
            fits = mask.dim() == 4 and mask.shape[-1] > 0
            fits = fits and all(n in (1, want) or want == "rows" for n, want in zip(mask.shape, wanted, strict=False))
            if not fits or mask.dtype != torch.bool:
                raise ValueError(
                    "keep and forget are bool [rows, layers, heads, positions], here "
                    f"[{', '.join(map(str, wanted))}, positions] or 1 for any of the first three; "
                    f"got {list(mask.shape)} {mask.dtype}"
                )
            if self.unit > 1:
                raise ValueError(f"keep and forget hold single entries, unit={self.unit} evicts several: use unit=1")

    def check_budget(self, rows: Sequence[Row]) -> None:
        """Refuse masks and pins that together keep more than a row's budget holds."""
        if self.keep is None:
            return
        length = max([self.keep.shape[-1], *(end for _, end in self.pins)])
        keep = torch.nn.functional.pad(self.keep, (0, length - self.keep.shape[-1])).cpu()
        for first, end in self.pins:
            keep[..., first:end] = True
        for i, row in enumerate(rows):
            asked = int(keep[min(i, len(keep) - 1), ..., row.first_protected :].sum(-1).max())
            if row.budget is not None and asked > row.budget.total - row.budget.window - row.protected:
                raise ValueError(
                    f"keep and pins ask for {asked} entries of a head beside {row.protected} protected ones and a "
                    f"window of {row.budget.window}: the budget of {row.budget.total} cannot hold them"
                )

    def restore(self) -> None:
        """Use the masks as they were set: beams and selected rows belong to the last request."""
        self.keep, self.forget = self._given

    def select(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        self.keep, self.forget = (
            mask if mask is None or mask.shape[0] == 1 else mask[list(order)] for mask in (self.keep, self.forget)
        )

    def at(self, which: list[int], positions: Tensor) -> Overrides:
        """What the masks say of candidates.

        Args:
            which: the batch rows.
            positions: int32 [R, L, H, C], positions of their candidates.
        """
        keep = self._read(self.keep, which, positions)
        for first, end in self.pins:
            pinned = (positions >= first) & (positions < end)
            keep = pinned if keep is None else keep | pinned
        return Overrides(keep, self._read(self.forget, which, positions))

    @staticmethod
    def _read(mask: Tensor | None, which: list[int], positions: Tensor) -> Tensor | None:
        """``mask`` [B, L, H, T] at ``positions`` [R, L, H, C]; False beyond T."""
        if mask is None:
            return None
        mask = mask.to(positions.device)
        mask = mask if mask.shape[0] == 1 else mask[which]
        shape = torch.broadcast_shapes(mask.shape[:3], positions.shape[:3])
        inside = positions < mask.shape[-1]
        index = positions.clamp(0, mask.shape[-1] - 1).to(torch.int64).expand(*shape, -1)
        return mask.expand(*shape, -1).gather(-1, index) & inside
