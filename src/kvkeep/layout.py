"""Where entries lie, and what a round or a new turn does to the slots: pure arithmetic.

Between rounds a row holds its entries in slots ``[0, cached)``::

    [0, protected)            the protected prefix, never written again
    [protected, cached - w)   the candidates
    [cached - w, cached)      the window: the newest w entries, in the order they came

Slots behind the prefix are numbered by *rank*: rank c is slot ``start + c``. The first C ranks are
the candidates, behind them come the newest.

A round frees the last slots, K and beyond. It draws victims among the candidates, and what survives
in the slots to be freed moves into the victims' slots. With w = r these are the newest r entries:
the i-th newest overwrites the i-th victim, r moves a head and nothing else. They need no window of
their own afterwards, since the next round's newest are tokens that are still to come. (With w > r
the newest w - r stay in order: they move down as one copy.)

A new turn frees the slots right behind the protected prefix instead, where the new prompt tokens
go, and moves the entries since the last round up, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, lcm

from .budget import Budget, round_up
from .protection import Protection


@dataclass(frozen=True)
class Round:
    """What a round, or the room made for a new turn, does to one row's slots.

    Attributes:
        number: counts a request's rounds and turns from 0; enters the draws.
        start: slot of rank 0.
        candidates: C, ranks that can be evicted.
        victims: entries evicted from each head, all among the candidates.
        window: newest entries that move as one copy, in order.
        newest: ranks between the candidates and the window: they stay, but may have to move.
        fresh: empty slots behind the candidates that the window's way up opens (turns only);
            they have ranks C, C + 1, ... and are filled like victims' slots.
        turn: False frees the last ``victims`` candidate slots, True the first ``victims + fresh``.
        prefill: True if it compresses the context after its prefill.
    """

    number: int
    start: int
    candidates: int
    victims: int
    window: int
    newest: int = 0
    fresh: int = 0
    turn: bool = False
    prefill: bool = False

    @property
    def freed(self) -> int:
        """Slots that are free afterwards."""
        return self.victims + self.fresh

    @property
    def window_from(self) -> int:
        return self.start + self.candidates + self.newest

    @property
    def window_to(self) -> int:
        return self.window_from + (self.fresh if self.turn else -self.victims)


@dataclass
class Row:
    """The slots of one request, as plain numbers.

    Args:
        budget: resolved by :meth:`Budget.for_prompt`; None never evicts.
        protection: what is protected.
        unit: slots that live and die together; the candidates start at a multiple of it.
        keep: share of the context that stays after its prefill; None: all of it.
        keep_window: newest entries of the context that stay then.
    """

    budget: Budget | None
    protection: Protection = field(default_factory=Protection)
    unit: int = 1
    keep: float | None = None
    keep_window: int = 0
    asked: Budget | None = None  # as configured, before any prompt was accounted for
    prompt_length: int = 0  # of all turns
    protected: int = 0
    first_protected: int = 0  # protected prefix of the first turn: there, slots are positions
    cached: int = 0
    ordered: int = 0  # newest entries that lie last, in the order they came
    seen: int = 0
    rounds: int = 0  # rounds and turns so far
    trace_rounds: int = 0
    evicted: int = 0
    compressed: int | None = None  # entries that the context kept
    dropped: int = 0  # entries that it lost
    held: tuple[int, ...] = ()  # entries of each layer, whose mean is `cached`; empty: all layers hold the same
    shift: int = 0  # entries that one layer holds beyond the mean, in what `at_layer` gives

    @classmethod
    def new(
        cls,
        budget: Budget | None,
        protection: Protection,
        unit: int = 1,
        keep: float | None = None,
        keep_window: int = 0,
    ) -> Row:
        """An empty row; the prompt is still to come."""
        if budget is not None:  # a budget that depends on the prompt stays a multiple of the unit
            budget = replace(budget, align=lcm(budget.align, unit))
        return cls(budget, protection, unit, keep, keep_window, asked=budget)

    def _held(self, protected: int) -> int:
        """Entries that can never be evicted when the protected prefix has this length."""
        return round_up(protected, self.unit) + self.protection.pinned(self.first_protected)

    # ---- the first prompt -------------------------------------------------------------------

    def add_prompt(self, n: int) -> None:
        """Account for ``n`` more prompt tokens before the first trace token.

        Raises:
            ValueError: the prompt so far does not fit into the budget.
        """
        length = self.prompt_length + n
        prefix = self.protection.prefix(length)
        if self.asked is not None:
            held = round_up(prefix, self.unit) + self.protection.pinned(prefix)
            budget = self.asked.for_prompt(length - self.dropped, held)
            if self.unit > 1 and length > budget.limit(0):
                raise ValueError(
                    f"unit={self.unit} cannot cut a prompt of {length} tokens, longer than budget + buffer "
                    f"({budget.limit(0)}) and not protected: use unit=1 or a larger budget"
                )
            self.budget = budget
        self.prompt_length = length
        self.protected = self.first_protected = prefix
        self._append(n)

    def _append(self, n: int) -> None:
        self.cached += n
        self.held = tuple(entries + n for entries in self.held)
        self.seen += n
        self.ordered += n

    # ---- after the prefill ------------------------------------------------------------------

    @property
    def needs_compression(self) -> bool:
        """Whether the context is still to be compressed."""
        return self.keep is not None and self.compressed is None

    def next_compression(self) -> Round | None:
        """What cuts the context down to its share; None if nothing has to go.

        Raises:
            ValueError: the share is less than what is protected.
        """
        assert self.keep is not None
        start = round_up(self.protected, self.unit)
        kept = min(self.cached, round_up(ceil(self.keep * self.cached), self.unit))
        if self.cached == 0:
            raise ValueError("a row of the batch has no token in the context that prefill_keep is to compress")
        held = start + self.protection.pinned(self.first_protected, self.seen)
        if kept <= held:
            raise ValueError(
                f"prefill_keep={self.keep} of a context of {self.cached} tokens is {kept} entries, and "
                f"{held} are protected: keep more or protect less"
            )
        if kept == self.cached:
            self.compressed = kept
            return None
        window = self.keep_window
        if window and kept <= held + window:
            raise ValueError(
                f"prefill_keep={self.keep} of a context of {self.cached} tokens is {kept} entries, of which {held} are "
                f"protected and the newest {window} stay in any case: nothing is left to choose. Keep more, or pass a "
                "smaller window="
            )
        candidates = self.cached - window - start
        return Round(self.rounds, start, candidates, self.cached - kept, window, prefill=True)

    # ---- the trace --------------------------------------------------------------------------

    @property
    def limit(self) -> int | None:
        """Most entries a head may hold before the next round; None without a budget."""
        return None if self.budget is None else self.budget.limit(self.trace_rounds) + self.shift

    def needs_round(self) -> bool:
        """Whether the cache is full, so that a round must run before the next trace token."""
        return self.limit is not None and self.cached >= self.limit

    def space(self) -> int | None:
        """Trace tokens that can be added at once (a due round included); None without a budget."""
        if self.budget is None or self.limit is None:
            return None
        if self.needs_round():
            return self.budget.every
        return self.limit - self.cached

    def next_round(self) -> Round:
        """The round that is due; :meth:`apply` accounts for it."""
        if self.budget is None:
            raise ValueError("a row without a budget runs no rounds")
        start = round_up(self.protected, self.unit)
        candidates = self.cached - self.budget.window - start
        victims = self.cached - self.budget.kept(self.trace_rounds)
        # Of the newest, those that the next round's window will hold as well must stay in order.
        window = max(0, self.budget.window - self.budget.every)
        return Round(self.rounds, start, candidates, victims, window, newest=self.budget.window - window)

    def add_trace(self, n: int) -> None:
        """Account for ``n`` trace tokens, which fill the slots from ``cached`` on."""
        self._append(n)

    # ---- later turns ------------------------------------------------------------------------

    @property
    def turn_slot(self) -> int:
        """First slot of a new turn's prompt tokens, once :meth:`next_turn` has been carried out."""
        return self.protected if self._turns_are_protected else self.cached

    @property
    def _turns_are_protected(self) -> bool:
        return self.budget is not None and self.protection.share > 0

    def next_turn(self, n: int) -> Round | None:
        """What makes room for ``n`` prompt tokens of a new turn.

        Protected turns become slots [P, P + n). Nothing is evicted while everything fits into
        K + r. Otherwise n entries make way (fewer if the cache was not yet at K), so that the
        row's place between two rounds stays what it was. The entries since the last round stay,
        but not the whole window: older ones no longer lie in order. Unprotected turns are appended.

        Returns:
            None if nothing has to move.

        Raises:
            ValueError: the new turn does not fit beside the protected prefix and the window.
        """
        if self.held and self._turns_are_protected:
            raise ValueError(
                "layers have their own budgets by now, so a later turn cannot be protected: use protect='none', which "
                "appends it, or a policy with one budget for all layers"
            )
        if self.keep is not None and self._turns_are_protected:
            raise ValueError("a second turn after prefill_keep needs protect='none' or sinks: it is appended as it is")
        if self.asked is None:
            return None
        if self.unit > 1:
            raise ValueError(
                "a second turn needs unit=1, since its length is arbitrary: use unit=1 or start a new cache"
            )
        if not self._turns_are_protected:
            return None
        if self.protection.share < 1:
            raise ValueError("a second turn needs protect='prompt' or protect='none': a share of a turn is not defined")
        budget = self.asked.for_prompt(self.prompt_length + n, self._held(self.protected + n))
        window = min(budget.window, self.ordered, self.cached - self.protected)
        candidates = self.cached - self.protected - window
        kept, victims = budget.kept(max(self.trace_rounds - 1, 0)), 0
        if self.cached + n > kept + budget.every:
            victims = min(n, self.cached + n - kept)
        if victims > max(0, candidates - self.protection.pinned(self.first_protected, self.seen)):
            raise ValueError(
                f"a new turn of {n} tokens does not fit: beside {self.protected} protected entries and a window of "
                f"{window} there are {candidates} entries, and {victims} would have to go. Raise the budget of {kept}, "
                "use scope='grow', or start a new cache."
            )
        if self.cached == self.protected:
            return None
        return Round(self.rounds, self.protected, candidates, victims, window, fresh=n - victims, turn=True)

    def apply(self, event: Round, held: Sequence[int] = ()) -> None:
        """Account for a round, or for the room made for a turn, once it has been carried out.

        Args:
            event: what happened.
            held: entries of each layer from now on, where layers differ.
        """
        self.rounds += 1
        self.cached -= event.victims
        self.held = tuple(held)
        self.evicted += event.victims
        self.ordered = event.window
        if event.prefill:
            self.compressed, self.dropped = self.cached, event.victims
            if self.asked is not None:  # what was evicted no longer counts as prompt
                self.budget = self.asked.for_prompt(self.prompt_length - self.dropped, self._held(self.protected))
        elif not event.turn:
            self.trace_rounds += 1

    # ---- layers that differ -----------------------------------------------------------------

    def by_layer(self, layers: int) -> tuple[int, ...]:
        """Entries of each of ``layers`` layers."""
        return self.held or (self.cached,) * layers

    def at_layer(self, index: int) -> Row:
        """This row as the layer sees it."""
        if not self.held:
            return self
        return replace(self, cached=self.held[index], held=(), shift=self.held[index] - self.cached)

    def event_at(self, event: Round, index: int, kept: int) -> Round:
        """``event`` (a round or a compression) as it is for one layer, which holds ``kept`` entries afterwards."""
        more = (self.held[index] if self.held else self.cached) - self.cached
        return replace(event, candidates=event.candidates + more, victims=self.cached + more - kept)

    def add_turn(self, n: int) -> None:
        """Account for the ``n`` prompt tokens of a new turn, now in the slots from :attr:`turn_slot` on."""
        self.prompt_length += n
        appended = self.turn_slot == self.cached
        if self._turns_are_protected:
            self.protected += n
        if self.asked is not None:
            self.budget = self.asked.for_prompt(self.prompt_length - self.dropped, self._held(self.protected))
        self.cached += n
        self.held = tuple(entries + n for entries in self.held)
        self.seen += n
        if appended:
            self.ordered += n
