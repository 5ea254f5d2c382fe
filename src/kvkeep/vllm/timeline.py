"""A request's slots and rounds as functions of the token's position: pure arithmetic, no state.

The scheduler's process and the workers compute it separately and agree, also after a preemption. It is the same
:class:`~kvkeep.layout.Row` that the transformers engine goes through token by token, so kept positions are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..layout import Round, Row
from .config import Serving


@dataclass(frozen=True)
class Timeline:
    """Slots of one request.

    Token p lies in slot p until the cache is full; from then on in slots [K, K + r) over and over, and a round runs
    each time before slot K is written again.

    Attributes:
        prompt: its prompt's tokens.
        shared: first tokens of the prompt whose slots no round writes.
        kept: K, with what the prompt made it grow by.
        every: r.
        first: position of the token before which round 0 runs.
        slots: most slots it ever needs.
        row: the row before any round.
    """

    prompt: int
    shared: int
    kept: int
    every: int
    first: int
    slots: int
    row: Row

    @classmethod
    def of(cls, serving: Serving, prompt: int) -> Timeline:
        """The timeline of a request with a prompt of ``prompt`` tokens.

        Raises:
            ValueError: the prompt cannot be served under these settings.
        """
        settings = serving.settings
        row = Row.new(serving.budget, settings.protection, serving.policy.slots_per_unit)
        row.add_prompt(prompt)
        budget = row.budget
        assert budget is not None
        slots = max(prompt, budget.limit(0))
        return cls(prompt, row.protected, budget.total, budget.every, slots, slots, row)

    @property
    def grown(self) -> int:
        """Entries by which the prompt made the budget larger than was asked for."""
        assert self.row.asked is not None
        return self.kept - self.row.asked.total

    def slot(self, position: int) -> int:
        """Where the token at ``position`` is written."""
        if position < self.first:
            return position
        return self.kept + (position - self.first) % self.every

    def rounds(self, position: int) -> int:
        """Rounds that have run when the token at ``position`` is written."""
        return 0 if position < self.first else 1 + (position - self.first) // self.every

    def due(self, position: int) -> bool:
        """Whether a round runs right before the token at ``position`` is written."""
        return position >= self.first and (position - self.first) % self.every == 0

    def evicted(self, rounds: int) -> int:
        """Entries that each head has lost after this many rounds."""
        return 0 if rounds == 0 else (self.first - self.kept) + (rounds - 1) * self.every

    def event(self, number: int) -> Round:
        """What round ``number`` does to the row."""
        cached = self.first if number == 0 else self.kept + self.every
        seen = self.first + number * self.every
        return replace(self.row, cached=cached, seen=seen, rounds=number, trace_rounds=number).next_round()
