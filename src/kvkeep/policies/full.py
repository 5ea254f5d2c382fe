"""The full cache: what every method is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Policy, PolicyScope


@dataclass(frozen=True)
class Full(Policy):
    """Keep everything; runs no rounds, so no budget applies."""

    name: ClassVar[str] = "full"
    rule: ClassVar[str] = "keep every entry"
    paper: ClassVar[str] = "the uncompressed cache"
    published_protection: ClassVar[str] = "all"
    default_protection: ClassVar[str] = "none"
    content_free: ClassVar[bool] = True
    evicts: ClassVar[bool] = False

    @property
    def scope(self) -> PolicyScope:
        return "model"
