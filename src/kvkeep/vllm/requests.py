"""The worker's side of a request: its timeline, its draws, and what positional and whole-block policies remember."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from ..draws import stream_of
from ..layout import Round
from ..plan import Moves, plan
from ..positions import PositionStore
from .config import Serving
from .timeline import Timeline
from .views import Heads, look


class Tracked:
    """A request in the worker's batch.

    Everything here is a function of the prompt, the seed and the number of rounds: asked for fewer rounds than it has
    been through, as after a preemption, it starts over.

    Args:
        serving: the engine's settings.
        prompt: ids of the prompt.
        sample: the request's own seed.
    """

    def __init__(self, serving: Serving, prompt: Sequence[int], sample: int) -> None:
        self.serving, self.sample = serving, sample
        self.timeline = Timeline.of(serving, len(prompt))
        self.prompt = prompt
        self._stores: dict[Heads, _Positions] = {}
        self._blocks: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._edits = 0  # rounds that `_blocks` has been through

    @cached_property
    def stream(self) -> int:
        """What its draws depend on beside the run's seed."""
        return stream_of(self.prompt, self.sample)

    def same_draws(self, other: Tracked) -> bool:
        """Whether two requests share every draw."""
        return self.sample == other.sample and self.prompt == other.prompt

    def positions(self, where: Heads) -> _Positions:
        """Positions of what these heads hold, for policies that ask for them."""
        if where not in self._stores:
            self._stores[where] = _Positions(self, where)
        return self._stores[where]

    def order(self, rounds: int, size: int) -> NDArray[np.int64]:
        """Which of the request's blocks lies where after rounds that only edit the block table.

        Args:
            rounds: rounds that have run.
            size: slots of a block, which divides the policy's unit.

        Returns:
            int64 [n]: at index i, the number (in the order vLLM gave them) of the i-th block in use.
        """
        if rounds < self._edits or not len(self._blocks):
            self._blocks, self._edits = np.arange(-(-self.timeline.slots // size)), 0
        unit = self.serving.policy.slots_per_unit
        while self._edits < rounds:
            event = self.timeline.event(self._edits)
            moves = plan(self.serving.policy.keys(look(self.serving, [self], [event], Heads.any())), [event], unit)
            src, dst = (slots.flatten()[::size].numpy() // size for slots in (moves.src, moves.dst))
            self._blocks[dst], self._blocks[src] = self._blocks[src], self._blocks[dst]
            if event.window:  # its way down: the freed blocks before it come behind it
                first, after = event.window_to // size, (event.window_from + event.window) // size
                self._blocks[first:after] = np.roll(
                    self._blocks[first:after], event.window_to // size - event.window_from // size
                )
            self._edits += 1
        return self._blocks


class _Positions:
    """Positions of one request's entries in the heads of one block table, round by round."""

    def __init__(self, request: Tracked, where: Heads) -> None:
        self._request, self._where = request, where
        self._shape = where.shape(request.serving)
        self._restart()

    def _restart(self) -> None:
        self._store = PositionStore(1, *self._shape, self._request.timeline.slots, torch.device("cpu"))
        self._rounds = 0

    def candidates(self, number: int) -> torch.Tensor:
        """Positions of round ``number``'s candidates in rank order, int32 [1, L, H, C] (L, H are 1 where shared)."""
        if number < self._rounds:
            self._restart()
        serving = self._request.serving
        while self._rounds < number:
            event = self._due(self._rounds)
            positions, order = self._store.candidates([0], [event]).sort(dim=-1, stable=True)
            keys = serving.policy.keys(look(serving, [self._request], [event], self._where, positions))
            self.note(event, plan(keys, [event], serving.policy.slots_per_unit, ranks=order))
        return self._store.candidates([0], [self._due(number)])

    def note(self, event: Round, moves: Moves) -> None:
        """The round whose candidates were asked for last has run; ``moves`` are this request's."""
        self._store.apply([0], [event], moves)
        self._rounds += 1

    def _due(self, number: int) -> Round:
        timeline = self._request.timeline
        event = timeline.event(number)
        self._store.fill(0, event.window_from + event.window, timeline.first + number * timeline.every)
        return event
