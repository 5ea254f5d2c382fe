"""The door between methods and engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from ..budget import Budget
from ..signals import ModelFacts, RoundView

#: Who shares a kept set: nobody, the heads of a layer, equal heads of all layers, or all heads of all layers.
PolicyScope = Literal["head", "layer", "head-of-all-layers", "model"]


def shared_axes(scope: PolicyScope, layers: int, heads: int) -> tuple[int, int]:
    """Sizes of the axes L and H of scores and positions: 1 where layers or heads share their kept set."""
    one_layer, one_head = scope in ("model", "head-of-all-layers"), scope in ("model", "layer")
    return 1 if one_layer else layers, 1 if one_head else heads


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
        prefill_window: newest entries of a context that stay when it is compressed, unless settings say otherwise.
        published_options: options of the method's own schedule, where these differ from the defaults.
        shown: options that are spelled out wherever the policy is named, since the method has several forms.
        digest_blocks: tokens of the prompt, and of the trace, that :meth:`digest` gets at once, for policies that name
            the signal ``digest``; None: it gets none of the trace.
    """

    name: ClassVar[str] = ""
    rule: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    signals: ClassVar[frozenset[str]] = frozenset()
    published_protection: ClassVar[str] = "none"
    default_protection: ClassVar[str] = "prompt"
    content_free: ClassVar[bool] = False
    evicts: ClassVar[bool] = True
    prefill_window: ClassVar[int] = 0
    published_options: ClassVar[Mapping[str, Any]] = {}
    shown: ClassVar[tuple[str, ...]] = ()
    digest_blocks: ClassVar[tuple[int, int | None]] = (1024, None)

    @property
    def title(self) -> str:
        """The name, with the options that are always spelled out."""
        told = ",".join(f"{option}={getattr(self, option)}" for option in self.shown)
        return f"{self.name}:{told}" if told else self.name

    @property
    def scope(self) -> PolicyScope:
        """Which heads share a kept set."""
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

    def check_model(self, model: ModelFacts) -> None:
        """Refuse a model that the policy (its calibration, say) does not fit.

        Raises:
            ValueError: with what differs and what to do.
        """

    def files(self) -> tuple[str, ...]:
        """Paths of files whose content decides what is kept, a calibration say."""
        return ()

    def schedule(self, budget: int) -> dict[str, Any]:
        """The paper's own schedule for K = ``budget``, as fields of Settings: buffer, window, growth, scope.

        ``budget`` itself is among them where the paper lets the cache grow from its own start. Empty: the paper has no
        schedule of its own.
        """
        return {}

    def query_window(self, budget: Budget) -> int:
        """Newest queries to keep for a policy that names the signal ``queries``; at least 1."""
        return max(budget.window, budget.every)

    # ---- for the signals ``digest`` and ``entropy`` -------------------------------------------------

    def digest(self, state: Tensor | None, queries: Tensor, positions: Tensor) -> Tensor:
        """Take a block of one layer's queries into the policy's own summary of them.

        Called with every block of :attr:`digest_blocks` tokens in order: prompt blocks row by row (the last of a prompt
        may be shorter), trace blocks for all rows at once.

        Args:
            state: what the last call returned, [R, ...]; None at a row's first.
            queries: float32 [R, H_q, n, D] before RoPE.
            positions: int64 [R, n], theirs.

        Returns:
            [R, ...], of a shape and type that never change.
        """
        raise NotImplementedError(f"{type(self).__name__} names the signal 'digest' but has no digest()")

    @property
    def entropy_shift(self) -> int:
        """0: an entry's entropy is of the prediction made at its token; 1: of the prediction of its token."""
        return 0

    @property
    def final_norm(self) -> bool:
        """Whether ``evolution`` compares with the last layer's hidden states after the model's final norm."""
        return False

    def entropy(self, logits: Tensor) -> Tensor:
        """float32 [..., V] next-token logits -> [...] nats, for policies that name the signal ``entropy``."""
        raise NotImplementedError(f"{type(self).__name__} names the signal 'entropy' but has no entropy()")

    # ---- a round ------------------------------------------------------------------------------------

    def score(self, view: RoundView) -> Tensor:
        """float32 [R, L, H, C], higher = keep; L and H are 1 where the scope shares them."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither score() nor draw_keys()")

    def draw_keys(self, view: RoundView) -> Tensor | None:
        """int32 [R, L, H, C / slots_per_unit], lowest = evicted first; None for scored policies."""
        return None

    def allot(self, view: RoundView, keys: Tensor) -> Tensor | None:
        """How many entries each layer keeps; None: all the same.

        Args:
            view: the round; ``view.kept`` is the mean over layers.
            keys: what :meth:`keys` gave for it.

        Returns:
            float64 [R, L] entries a head, protected ones and window included, whose mean over layers is ``view.kept``.
            The engine rounds them (:func:`kvkeep.budget.split`) so that the sum is exact and no layer is asked for more
            than it holds.
        """
        return None

    @property
    def splits(self) -> bool:
        """Whether :meth:`allot` may give layers different budgets."""
        return False

    def keys(self, view: RoundView) -> Tensor:
        """Draws or scores: what :func:`kvkeep.plan.plan` orders."""
        draws = self.draw_keys(view)
        return self.score(view) if draws is None else draws
