"""The door between methods and engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from ..budget import Budget
from ..signals import RoundView

PolicyScope = Literal["head", "layer", "model"]


@dataclass(frozen=True)
class Policy:
    """The rule that says which entries to keep.

    A method is one frozen dataclass: its fields are its options. It overrides either :meth:`score`
    or :meth:`draw_keys`. It sees no cache and no model, only a
    :class:`~kvkeep.signals.RoundView`, and knows neither rows nor slots of an engine.

    Class attributes:
        name: the short name in the registry.
        rule: the method in one line.
        paper: where it comes from.
        signals: what it must see, names from :mod:`kvkeep.signals`.
        published_protection: what its paper protects, in the notation of
            :meth:`~kvkeep.layout.Protection.parse`.
        default_protection: what kvkeep protects unless told otherwise.
        content_free: True if its kept positions do not depend on keys, values or queries.
        evicts: False for the full cache.
    """

    name: ClassVar[str] = ""
    rule: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    signals: ClassVar[frozenset[str]] = frozenset()
    published_protection: ClassVar[str] = "none"
    default_protection: ClassVar[str] = "prompt"
    content_free: ClassVar[bool] = False
    evicts: ClassVar[bool] = True

    @property
    def scope(self) -> PolicyScope:
        """Which heads share a kept set: none ("head"), those of a layer, or all of the model."""
        return "head"

    @property
    def slots_per_unit(self) -> int:
        """Consecutive slots that live and die together."""
        return 1

    def check(self, heads: int, budget: Budget) -> None:
        """Refuse options that do not fit a model with ``heads`` KV heads or a budget.

        Raises:
            ValueError: with the value and what to do.
        """

    def query_window(self, budget: Budget) -> int:
        """Newest queries to keep for a policy that names the signal ``queries``; at least 1."""
        return max(budget.window, budget.every)

    def score(self, view: RoundView) -> Tensor:
        """float32 [R, L, H, C], higher = keep; L and H are 1 where the scope shares them."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither score() nor draw_keys()")

    def draw_keys(self, view: RoundView) -> Tensor | None:
        """int32 [R, L, H, C / slots_per_unit], lowest = evicted first; None for scored policies."""
        return None

    def keys(self, view: RoundView) -> Tensor:
        """Draws or scores: what :func:`kvkeep.plan.plan` orders."""
        draws = self.draw_keys(view)
        return self.score(view) if draws is None else draws
