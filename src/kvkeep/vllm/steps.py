"""One step of the engine cut into phases, so that every round runs where it is due.

Nearly always there is one phase: each request has one new token, or a piece of its prompt. Only a request that was
preempted feeds many trace tokens at once, across several rounds: then each phase ends where a round of one of the
rows is due, and layers go through the phases one after the other. Pure arithmetic on numpy arrays; draws are pure
functions, so what is replayed is what ran before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .requests import Tracked

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Phase:
    """Tokens that are written and attended to together, after the rounds that are due before them.

    Attributes:
        rows: batch rows that have tokens in this phase, ascending.
        tokens: indices in the batch of these rows' tokens, row by row; None: all tokens of the batch.
        starts: where each row's tokens begin among them, and their number: [rows + 1].
        lengths: entries that each row holds once its tokens are written.
        rounds: rounds that each row has been through.
        due: index (into ``rows``) of rows whose last round runs right before this phase.
        slots: slot of each token.
        owners: index (into ``rows``) of each token.
    """

    rows: Ints
    tokens: Ints | None
    starts: Ints
    lengths: Ints
    rounds: Ints
    due: Ints
    slots: Ints
    owners: Ints


class Rows:
    """Timelines of a batch's rows, as arrays."""

    def __init__(self, requests: Sequence[Tracked]) -> None:
        self.requests = requests
        self.first = np.array([r.timeline.first for r in requests], dtype=np.int64)
        self.kept = np.array([r.timeline.kept for r in requests], dtype=np.int64)
        self.every = np.array([r.timeline.every for r in requests], dtype=np.int64)

    def rounds(self, rows: Ints, positions: Ints) -> Ints:
        """Rounds that have run when these rows' tokens at ``positions`` are written."""
        ran = 1 + (positions - self.first[rows]) // self.every[rows]
        return np.where(positions < self.first[rows], 0, ran)

    def slots(self, rows: Ints, positions: Ints) -> Ints:
        """Slots of these rows' tokens at ``positions``."""
        again = self.kept[rows] + (positions - self.first[rows]) % self.every[rows]
        return np.where(positions < self.first[rows], positions, again)

    def single(self, positions: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """Slots of one token a row, and whether a round is due right before it."""
        since = positions - self.first
        past = since % self.every
        full = since >= 0
        return np.where(full, self.kept + past, positions), full & (past == 0)

    def phases(self, starts: Ints, computed: Ints) -> Iterator[Phase]:
        """Cut a step.

        Args:
            starts: where each row's tokens begin in the batch, and their number: [R + 1].
            computed: tokens of each row that earlier steps computed: [R].
        """
        rows = np.arange(len(computed))
        ends = computed + np.diff(starts)
        ran = self.rounds(rows, computed)
        crossed = np.where(ends > computed, self.rounds(rows, ends - 1) - ran, 0)
        for number in range(int(crossed.max(initial=0)) + 1):
            # The next round of a row that has been through n is due before token `first + n * every`.
            begin = computed if number == 0 else self.first + (ran + number - 1) * self.every
            end = np.minimum(ends, self.first + (ran + number) * self.every)
            yield self._phase(starts, computed, begin, end, ran + number)

    def _phase(self, starts: Ints, computed: Ints, begin: Ints, end: Ints, ran: Ints) -> Phase:
        rows = np.flatnonzero(end > begin)
        counts = (end - begin)[rows]
        within = np.concatenate([[0], np.cumsum(counts)])
        owners = np.repeat(np.arange(len(rows)), counts)
        positions = begin[rows][owners] + np.arange(within[-1]) - within[:-1][owners]
        all_tokens = within[-1] == starts[-1]
        tokens = None if all_tokens else starts[rows][owners] + positions - computed[rows][owners]
        due = (ran[rows] > 0) & (begin[rows] == self.first[rows] + (ran[rows] - 1) * self.every[rows])
        lengths = self.slots(rows, end[rows] - 1) + 1
        slots = self.slots(rows[owners], positions)
        return Phase(rows, tokens, within, lengths, ran[rows], np.flatnonzero(due), slots, owners)
