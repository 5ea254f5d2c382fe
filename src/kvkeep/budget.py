"""How many entries each KV head may keep, and when a round runs.

Pure arithmetic on Python integers: both engines resolve a request's budget with
:meth:`Budget.for_prompt`, so that the same prompt keeps the same positions in both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor, inf, isfinite
from typing import Literal, get_args

Scope = Literal["total", "trace", "grow"]


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``n``."""
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class Budget:
    """Entries per KV head and layer that remain after a round.

    ``total`` counts everything that is kept: prompt, window and chosen entries. This is the meaning
    of ``token_budget`` in the code of Random Attention (its paper's text adds the buffer on top).

    Args:
        total: K, entries per KV head and layer that remain after a round.
        every: r, tokens cached between two rounds; the cache never holds more than K + r entries.
        window: w, the newest entries that are always kept. Defaults to ``every``.
        growth: None keeps K constant. ``c`` lets K grow by r / c entries a round (RPC, InfoKV).
        scope: what a prompt does to the budget, see :meth:`for_prompt`.
        align: budgets that depend on the prompt are rounded up to a multiple of this. A paged
            engine needs its block size here; give both engines the same value to compare them.
        room: entries beside the protected prefix that ``scope="grow"`` guarantees. Defaults to
            ``window + every``, the least that leaves a policy a choice.

    Raises:
        ValueError: a field is out of range; the message says which and what to do.
    """

    total: int
    every: int
    window: int = -1
    growth: float | None = None
    scope: Scope = "total"
    align: int = 1
    room: int = -1

    def __post_init__(self) -> None:
        if self.window == -1:
            object.__setattr__(self, "window", self.every)
        if self.room == -1:
            object.__setattr__(self, "room", self.window + self.every)
        for name, least in (("total", 1), ("every", 1), ("window", 0), ("align", 1), ("room", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if self.total <= self.every and self.growth is None:
            raise ValueError(
                f"budget {self.total} is not larger than the buffer {self.every}: a round frees "
                f"{self.every} of {self.total} entries. Raise the budget or lower the buffer."
            )
        if self.total < self.window:
            raise ValueError(
                f"budget {self.total} is smaller than the window {self.window}, which is always kept. "
                "Raise the budget or lower the window."
            )
        if self.growth is not None and (
            isinstance(self.growth, bool) or not isinstance(self.growth, int | float) or not 1 <= self.growth < inf
        ):
            raise ValueError(
                f"growth must be a number of at least 1 (K grows by r / growth a round), got {self.growth!r}"
            )
        if self.scope not in get_args(Scope):
            raise ValueError(f"scope must be one of {', '.join(get_args(Scope))}, got {self.scope!r}")
        if self.scope == "grow" and self.room < self.window:
            raise ValueError(f"room {self.room} is smaller than the window {self.window}, which is always kept")

    @classmethod
    def without_rounds(cls, window: int) -> Budget:
        """A budget that no round ever reaches, where only a context is compressed."""
        return cls(1 << 40, max(1, window), window)

    def kept(self, number: int) -> int:
        """Entries a head holds after round ``number`` (rounds count from 0)."""
        return self.total if self.growth is None else self.total + floor(number * self.every / self.growth)

    def limit(self, number: int) -> int:
        """Most entries a head holds before round ``number``: r more than the round before left, or would have left.

        So a budget that grows frees r - r / c entries in its first round as in every other: RPC compresses for the
        first time at P + R tokens.
        """
        return self.kept(number - 1) + self.every

    def for_prompt(self, prompt_length: int, protected: int | None = None) -> Budget:
        """The budget of one request, with its prompt accounted for.

        Args:
            prompt_length: tokens of the request's prompt, without padding.
            protected: entries that can never be evicted (prefix and pins); the whole prompt by default.

        Returns:
            A budget with ``scope="total"``:
            ``total``  K itself; refused when the protected entries and the window do not fit in it.
            ``trace``  K + prompt_length: the budget counts only the trace.
            ``grow``   max(K, protected + room), so a long prompt brings its own budget.

        Raises:
            ValueError: ``scope="total"`` and the prompt does not fit. It is never cut silently.
        """
        if prompt_length < 0:
            raise ValueError(f"prompt_length must not be negative, got {prompt_length}")
        must_stay = prompt_length if protected is None else protected
        total = self.total
        if self.scope == "trace":
            total = round_up(self.total + prompt_length, self.align)
        elif self.scope == "grow":
            total = max(self.total, round_up(must_stay + self.room, self.align))
        if must_stay + self.window > total:
            raise ValueError(
                f"the prompt does not fit: {must_stay} protected entries and a window of {self.window} need a "
                f"budget of at least {must_stay + self.window}, got {total}. Raise the budget, or pass "
                'scope="grow" (a longer prompt brings its own budget) or scope="trace" (only the trace counts).'
            )
        return replace(self, total=total, scope="total")


def split(wanted: Sequence[float], total: int, least: int, most: Sequence[int]) -> list[int]:
    """Whole numbers of entries for each layer, as near to what is wanted as the bounds allow.

    What a layer cannot hold or must not lose is shared by the others in proportion to what they want beyond ``least``;
    remainders go to the largest fractions, then to the first layers.

    Args:
        wanted: entries that each layer should keep; only their proportions beyond ``least`` matter.
        total: their exact sum.
        least: entries that no layer may fall below (protected and newest).
        most: entries that each layer holds.

    Raises:
        ValueError: the bounds leave no solution, or a number is not finite.
    """
    layers = len(wanted)
    if len(most) != layers or not layers * least <= total <= sum(most) or min(most, default=0) < least:
        raise ValueError(
            f"{total} entries cannot be split over {layers} layers that keep at least {least} and hold {list(most)}"
        )
    if not all(isfinite(w) for w in wanted):
        raise ValueError(f"a layer's budget is not a finite number: {list(wanted)}")
    weights = [max(w - least, 0.0) for w in wanted]
    shares = [0.0] * layers
    free, left = set(range(layers)), float(total - layers * least)
    while free:  # each pass fills at least one layer up, or ends
        weight = sum(weights[i] for i in free)
        give = {i: left * (weights[i] / weight if weight else 1 / len(free)) for i in free}
        full = {i for i in free if give[i] >= most[i] - least}
        if not full:
            shares = [give.get(i, share) for i, share in enumerate(shares)]
            break
        for i in full:
            shares[i] = float(most[i] - least)
            left -= shares[i]
        free -= full
    kept = [floor(share + 1e-9) for share in shares]
    short = total - layers * least - sum(kept)
    order = sorted((i for i in range(layers) if kept[i] < most[i] - least), key=lambda i: (kept[i] - shares[i], i))
    for i in order[:short]:
        kept[i] += 1
    return [least + k for k in kept]
