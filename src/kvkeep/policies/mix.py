"""Two policies share a budget: what does a fair die, or another method, add to a score?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..budget import Budget
from ..plan import sortable
from ..signals import DIGEST, ENTROPY, EVOLUTION, KEYS, POSITIONS, QUERIES, ModelFacts, RoundView
from .base import Policy, PolicyScope
from .options import fraction

#: Signals that an engine makes in one way only, the policy's.
_ONE = (DIGEST, ENTROPY, EVOLUTION)


@dataclass(frozen=True)
class Mix(Policy):
    """Of the candidates that can stay, the second policy keeps its best, then the first keeps its own of the others.

    With m candidates to keep, the second keeps floor((1 - share) m + 1/2) and the first the rest. So ``share=1`` keeps
    what the first alone would, ``share=0`` what the second would. With random first, all that the second leaves has the
    same chance. Candidates come by position for both, so random's draws are not those it makes alone, which go by slot.

    Args:
        first: a policy, with its options behind plus signs: ``random`` or ``recency``.
        second: the same: ``rkv``, ``rkv+lam=0.5+kernel=5``.
        share: of the first, 0 to 1.
    """

    first: str = "random"
    second: str = "rkv"
    share: float = 0.5

    name: ClassVar[str] = "mix"
    rule: ClassVar[str] = "keep one policy's best, then another's choice of the rest"
    paper: ClassVar[str] = "kvkeep's own, a probe"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS, KEYS})  # and those of its parts
    published_protection: ClassVar[str] = "none"

    def __post_init__(self) -> None:
        fraction(self, "share")
        parts = [_part(name, getattr(self, name)) for name in ("first", "second")]
        object.__setattr__(self, "_parts", tuple(parts))
        object.__setattr__(self, "signals", parts[0].signals | parts[1].signals | self.signals)
        for signal in _ONE:
            if all(signal in part.signals for part in parts):
                raise ValueError(
                    f"mix: {self.first} and {self.second} both need the signal {signal!r}, which an engine makes for "
                    "one policy only: mix one of them with another policy"
                )
        for part in parts:
            if DIGEST in part.signals:
                object.__setattr__(self, "digest_blocks", part.digest_blocks)
        self._refuse_scopes()

    @property
    def parts(self) -> tuple[Policy, Policy]:
        """First and second."""
        parts: tuple[Policy, Policy] = self.__dict__["_parts"]
        return parts

    @property
    def scope(self) -> PolicyScope:
        """The narrower of both: ``model`` holds for any other scope too."""
        scopes = {part.scope for part in self.parts}
        if len(scopes) > 1:
            scopes -= {"model"}
        return scopes.pop() if len(scopes) == 1 else "head"

    def _refuse_scopes(self) -> None:
        """A score that heads share means nothing once they hold different entries; a draw or an order does."""
        for part in self.parts:
            if part.scope != self.scope and not part.content_free:
                raise ValueError(
                    f"mix: {part.name} scores one set for the scope {part.scope!r}, but {self.first} and "
                    f"{self.second} together keep one for the scope {self.scope!r}: give both the same{_draw(part)}"
                )

    def check(self, heads: int, budget: Budget) -> None:
        windows = {}
        for part in self.parts:
            part.check(heads, budget)
            if QUERIES in part.signals:
                windows[part.name] = part.query_window(budget)
        if len(set(windows.values())) > 1:
            said = " and ".join(f"{name} of {count}" for name, count in windows.items())
            raise ValueError(f"mix: {said} queries: give both the same number, e.g. second=rkv+queries=64")

    def files(self) -> tuple[str, ...]:
        return tuple(file for part in self.parts for file in part.files())

    def check_model(self, model: ModelFacts) -> None:
        for part in self.parts:
            part.check_model(model)

    def query_window(self, budget: Budget) -> int:
        return max(part.query_window(budget) for part in self.parts if QUERIES in part.signals)

    # ---- signals that one part makes ----------------------------------------------------------------

    def _maker(self, signal: str) -> Policy:
        return next((part for part in self.parts if signal in part.signals), self.parts[1])

    def digest(self, state: Tensor | None, queries: Tensor, positions: Tensor) -> Tensor:
        return self._maker(DIGEST).digest(state, queries, positions)

    @property
    def entropy_shift(self) -> int:
        return self._maker(ENTROPY).entropy_shift

    def entropy(self, logits: Tensor) -> Tensor:
        return self._maker(ENTROPY).entropy(logits)

    @property
    def final_norm(self) -> bool:
        return self._maker(EVOLUTION).final_norm

    # ---- a round ------------------------------------------------------------------------------------

    def score(self, view: RoundView) -> Tensor:
        assert view.layer is not None  # keys are among the signals
        layer = view.layer(0)
        assert layer.eligible is not None
        fixed = (layer.filled & ~layer.eligible).sum(-1).flatten()  # protected and window
        kept = torch.tensor(view.kept, device=fixed.device) - fixed
        best = torch.floor((1 - self.share) * kept.double() + 0.5).long()  # of the second policy
        there = layer.there()[:, None]  # [R, 1, 1, C]
        first, second = (_ranks(part.keys(view), there) for part in self.parts)
        width = there.shape[-1]
        scores = torch.where(second >= width - best.view(-1, 1, 1, 1).to(second.device), width + second, first)
        if self.scope == "head":
            scores = scores.expand(-1, len(view.layers), len(view.heads), -1)
        return scores.float()  # whole numbers, exact: 2 C is far below 2^24


def _ranks(keys: Tensor, there: Tensor) -> Tensor:
    """int64 [R, L, H, C], 0 goes first; ties to the older. What is not there ranks below all others."""
    order = (
        sortable(keys).masked_fill(~there.to(keys.device), torch.iinfo(torch.int64).min).argsort(dim=-1, stable=True)
    )
    return torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )


def _draw(part: Policy) -> str:
    """How random shares a part's kept set, if it can."""
    return (
        f", e.g. first=random+draw={part.scope}" if part.scope in ("layer", "model") else ", or the part another mode"
    )


def _part(which: str, text: Any) -> Policy:
    """The policy that ``name+option=value+...`` spells; a value is JSON if it reads as such, else text."""
    from .registry import make_policy  # which knows this class

    if not isinstance(text, str):
        raise ValueError(f"{which} is the name of a policy, got {text!r}")
    name, *pairs = (piece.strip() for piece in text.split("+"))
    options: dict[str, Any] = {}
    for pair in pairs:
        option, equals, value = pair.partition("=")
        if not equals or not option or not value or option in options:
            raise ValueError(f"{which}={text!r} is not spelled name+option=value+...: see {pair!r}")
        try:
            options[option] = json.loads(value)
        except json.JSONDecodeError:
            options[option] = value
    try:
        policy = make_policy(name, options)
    except ValueError as error:
        raise ValueError(f"{which}={text!r}: {error}") from error
    if not policy.evicts or isinstance(policy, Mix) or policy.splits or policy.slots_per_unit > 1:
        raise ValueError(
            f"{which}={text!r} cannot be mixed: a part evicts single entries, gives every layer the same budget and is "
            "no mix itself"
        )
    return policy
