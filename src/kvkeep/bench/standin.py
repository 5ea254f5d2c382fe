"""A cache of the transformers engine without a model: its own storage, rounds and signals, fed with random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..hf.layer import EvictingLayer
from ..hf.model import ModelInfo
from ..hf.reader import Reading
from ..hf.rounds import Rounds
from ..hf.stats import allocated
from ..hf.step import Step
from ..hf.steps import by_layer, prompt_step, trace_step
from ..hf.streams import Streams
from ..hf.watch import Watch, columns
from ..layout import Row
from ..rotary import Rotary
from ..settings import Settings
from ..signals import DIGEST, ENTROPY, EVOLUTION, ROTARY, ModelFacts
from .common import Arm
from .round import Shape

PROMPT = 96  # protected tokens, fewer if the budget is small; with r = 64, digests of 64 tokens are half full at rounds
THETA = 1e6  # of the rotation


@dataclass(frozen=True)
class ModelShape(Shape):
    """What signals depend on, beside the entries: by default Qwen3-4B's, apart from the number of layers."""

    query_heads: int = 32
    hidden: int = 2560  # numbers of a hidden state
    vocabulary: int = 151_936


class StandIn:
    """Rounds of one policy, and what it observes between them, as the engine runs them.

    Only the forwards are missing: keys, values, queries, hidden states and logits are random numbers, and their making
    is never timed.

    Args:
        settings: policy, budget, buffer, seed.
        shape: of cache and model.
        device: where it lies.
    """

    def __init__(self, settings: Settings, shape: ModelShape, device: torch.device) -> None:
        budget, policy = settings.make_budget(), settings.make_policy()
        if budget is None:
            raise ValueError(f"policy {settings.policy!r} runs no rounds: time one that evicts")
        policy.check(shape.heads, budget)
        numbers, exponents = range(shape.layers), torch.arange(0, shape.head_dim, 2, dtype=torch.float64)
        rotary = None
        if {ROTARY, DIGEST} & policy.signals:
            rotary = Rotary(THETA ** -(exponents / shape.head_dim))
        policy.check_model(
            ModelFacts(tuple(numbers), shape.heads, shape.query_heads, shape.head_dim, rotary, lambda: "")
        )
        self.policy, self.shape, self.device, self.budget = policy, shape, device, budget
        self._step: Step | None = None
        self.columns = 0
        self.layers = [
            EvictingLayer(i, shape.heads, self._part(i), lambda: self.columns, len(columns(policy))) for i in numbers
        ]
        decoder = nn.Module()
        decoder.layers = nn.ModuleList(nn.Identity() for _ in numbers)
        # The output layer is never run: logits are handed over, as the model's own forward does.
        info = ModelInfo(decoder, {}, [*self.layers], tuple(numbers), shape.heads, nn.Module(), None)
        self.watch = Watch(policy, info, self.layers, budget, rotary)
        self.rounds = Rounds(policy, settings, info, self.layers, self.watch)
        self.rounds.begin(shape.batch, device)
        self.rows = [Row.new(budget, settings.protection, policy.slots_per_unit) for _ in range(shape.batch)]
        self.streams = Streams(list(range(shape.batch)))
        self.streams.add(torch.zeros(shape.batch, 1, dtype=torch.int64), [0] * shape.batch)
        self.logits = self._random(shape.batch, 1, shape.vocabulary if ENTROPY in policy.signals else 0)
        self._fill(min(PROMPT, (budget.total - budget.window) // 2))

    def _part(self, i: int) -> Callable[[], Step | None]:
        return lambda: None if self._step is None else self._step.part(i)

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device).to(self.shape.dtype)

    def _queries(self, n: int) -> Tensor:
        return self._random(self.shape.batch, self.shape.query_heads, n, self.shape.head_dim)

    # ---- forwards -------------------------------------------------------------------------------

    def _fill(self, prompt: int) -> None:
        before = [replace(row) for row in self.rows]
        for row in self.rows:
            row.add_prompt(prompt)
        pads = [0] * len(self.rows)
        self._store(prompt_step(before, self.rows, pads, prompt, False, self.device))
        self.trace(self.rows[0].space() or 0)
        if self.watch.digests is not None:
            for layer in self.layers:
                self.watch.digests.add_prompt(layer.number, self._queries(prompt), pads)
                at = torch.arange(prompt, self.columns, device=self.device).expand(len(self.rows), -1)
                self.watch.digests.add_trace(layer.number, self._queries(at.shape[1]), at)
        if self.watch.ring is not None:
            window = self.watch.ring.window
            for layer in self.layers:
                self.watch.ring.add(layer.number, self._queries(window), self.columns - window)

    def _store(self, step: Step) -> list[Tensor]:
        """Store a forward's entries, with random numbers beside them; returns the keys each layer may see."""
        self._step, seen = step, []
        size = (self.shape.batch, self.shape.heads, step.columns, self.shape.head_dim)
        for i, layer in enumerate(self.layers):
            seen.append(layer.update(self._random(*size), self._random(*size))[0])
            for column in self.watch.columns.values():
                layer.note(step.part(i), column, torch.rand(self.shape.batch, step.columns, device=self.device) + 0.01)
        self.columns += step.columns
        self._step = None
        return seen

    def _next(self, n: int) -> Step:
        before = [replace(row) for row in self.rows]
        for row in self.rows:
            row.add_trace(n)
        masked = any(row.held for row in self.rows)

        def make(seen: Callable[[Row], Row]) -> Step:
            starts = [seen(row).cached for row in before]
            return trace_step(starts, [seen(row) for row in self.rows], n, masked, self.device)

        return by_layer(len(self.layers), self.rows, make)

    def trace(self, n: int) -> None:
        """Cache ``n`` trace tokens a row at once, unobserved."""
        self._store(self._next(n))

    @property
    def observes(self) -> bool:
        """Whether the policy asks to see anything of forwards."""
        return self.watch.taps or bool(self.watch.columns)

    def observe(self, clock: Callable[[Arm], float]) -> tuple[float, float]:
        """One trace token a row, as a forward of one column.

        Returns:
            ms that collecting the signals took in all layers, and ms of what is done once for all layers.
        """
        step = self._next(1)
        seen = self._store(step)
        reading, column = Reading(0, False, [0] * len(self.rows)), self.columns - 1
        every, once = 0.0, 0.0
        if self.watch.taps:
            queries = [self._queries(1) for _ in self.layers]

            def tap() -> None:
                for layer in self.layers:
                    i = layer.number
                    self.watch.attention(i, queries[i], seen[i], None, None, step, reading, self.rows, column)

            every += clock(tap)
        if {ENTROPY, EVOLUTION} & self.policy.signals:
            states = [self._random(self.shape.batch, 1, self.shape.hidden) for _ in self.layers]

            def states_known() -> None:
                for layer in self.layers:
                    if EVOLUTION in self.policy.signals:
                        self.watch.hidden(layer.number, states[layer.number])
                self.watch.end(step, states[-1])

            every += clock(states_known)
            predictions = self.watch.predictions
            if predictions is not None:
                once += clock(lambda: predictions.predicted(self.logits))
        return every, once

    # ---- rounds ---------------------------------------------------------------------------------

    @property
    def ahead(self) -> int:
        """Rounds that the engine plans at once: work is the same again only after so many."""
        return self.rounds.ahead([row.next_round() for row in self.rows])

    def round(self) -> None:
        """The round that is due in every row."""
        due = {i: row.next_round() for i, row in enumerate(self.rows)}
        held = self.rounds.run(due, self.rows, self.streams.get(len(self.rows)), 0, self.columns)
        for i, event in due.items():
            self.rows[i].apply(event, held.get(i, ()))
        self.rounds.shrink(self.rows)

    def settle(self) -> None:
        """Where layers have budgets of their own, run rounds until these no longer drift."""
        if self.policy.splits:
            for _ in range(self.budget.total // self.budget.every + 8):
                self.round()
                self.trace(self.budget.every)

    # ---- memory ---------------------------------------------------------------------------------

    def entries_nbytes(self) -> int:
        """Bytes allocated for entries."""
        return allocated(self.layers)

    def extra_nbytes(self) -> int:
        """Bytes allocated beside the entries, as ``stats()`` counts them: positions and the policy's state."""
        return self.rounds.positions_nbytes + self.rounds.state_nbytes

    def temporary_nbytes(self) -> int:
        """Peak of what one round allocates beyond what was there before."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = int(torch.cuda.memory_allocated(self.device))
            self.round()
            return int(torch.cuda.max_memory_allocated(self.device)) - before
        seen = _Peak()
        with seen:
            self.round()
        return seen.peak


class _Peak(TorchDispatchMode):
    """Most bytes of tensors that operations inside made and that lived at once, without kernels' own workspace."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = func(*args, **kwargs)
        self._live = {ref: size for ref, size in self._live.items() if not ref.expired()}
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._live[StorageWeakRef(storage)] = storage.nbytes()
        self.peak = max(self.peak, sum(self._live.values()))
        return made
