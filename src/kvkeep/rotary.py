"""Rotary position embedding as plain arithmetic: what policies need to turn a query, or to take its turn back.

Half-split pairing (component f turns with component f + F), as transformers' Llama, Qwen, Mistral, Phi and gpt-oss code
has it. The engine compares it with the model's own before a policy sees it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """Rotation of the first 2F of a head's D components; the others pass.

    Attributes:
        inv_freq: float64 [F] on the CPU, radians a token of each pair.
        scaling: what the model multiplies cosine and sine with (YaRN's attention factor), for queries and keys alike.
    """

    inv_freq: Tensor
    scaling: float = 1.0

    @property
    def pairs(self) -> int:
        """F."""
        return len(self.inv_freq)

    def angles(self, positions: Tensor) -> Tensor:
        """float64 [..., F] on the device of ``positions`` [...]."""
        return positions.to(torch.float64).unsqueeze(-1) * self.inv_freq.to(positions.device)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Turn as the model does.

        Args:
            x: [..., D].
            positions: whole numbers that broadcast with [...]; float64 angles, so far positions are exact.

        Returns:
            float32 [..., D].
        """
        angles = self.angles(positions)
        return self._turn(x, angles.cos() * self.scaling, angles.sin() * self.scaling)

    def unrotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Take the turn back: :meth:`rotate` of the result is ``x``. Shapes as there."""
        angles = self.angles(positions)
        return self._turn(x, angles.cos() / self.scaling, -angles.sin() / self.scaling)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x, cos, sin = x.float(), cos.float(), sin.float()
        first, second, rest = x.split([self.pairs, self.pairs, x.shape[-1] - 2 * self.pairs], dim=-1)
        turned = first * cos - second * sin
        return torch.cat([turned, second * cos + first * sin, rest.expand(*turned.shape[:-1], -1)], dim=-1)

    def complex(self, x: Tensor) -> Tensor:
        """complex64 or complex128 [..., F]: pair f of ``x`` [..., D] as x[f] + i x[f + F]."""
        x = x if x.dtype == torch.float64 else x.float()
        return torch.complex(x[..., : self.pairs].contiguous(), x[..., self.pairs : 2 * self.pairs].contiguous())
