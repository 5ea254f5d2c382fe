"""What an evaluation asks of a model: the door between the runner and the tasks.

A task makes problems, runs a batch of them through an engine, and scores each. Whether it generates and grades, or
forces a given trace and reads probabilities, is its own business; the runner, the statistics and the results folder
are the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from ..engine import Engine


@dataclass(frozen=True)
class Item:
    """One problem.

    Attributes:
        id: names the problem for good; statistics pair arms by it.
        prompt: token ids of the prompt, chat template included.
        length: tokens of prompt and expected trace together: what a compression of 1 would hold.
        data: whatever the task needs to run and grade it.
    """

    id: str
    prompt: tuple[int, ...]
    length: int
    data: Any = None


@dataclass(frozen=True)
class Outcome:
    """What one run of one problem under one policy gave.

    Attributes:
        score: the task's metric: 1.0 or 0.0 for a right or wrong answer, otherwise any finite number.
        answered: an answer could be read.
        truncated: the token limit was reached before the end token.
        tokens: tokens of the trace.
        text: the trace, or "" where a trace was forced.
        stats: the engine's account: rounds, evicted, entries, bytes (see :meth:`kvkeep.hf.cache.EvictCache.stats`).
        metrics: further numbers, each averaged and shown beside the score.
    """

    score: float
    answered: bool
    truncated: bool
    tokens: int
    text: str = ""
    stats: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@runtime_checkable
class Task(Protocol):
    """Problems and how to score them.

    Attributes:
        name: canonical text that makes the task again, e.g. ``abacus:n=16,mode=r0``.
        metric: what ``score`` is: ``accuracy``, ``kl`` (nats), ...
        bounds: range of the score, None if unbounded.
        higher_is_better: whether a larger score is a better one.
    """

    name: str
    metric: str
    bounds: tuple[float, float] | None
    higher_is_better: bool

    def items(self, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> list[Item]:
        """The first ``count`` problems of the set that ``seed`` names."""
        ...

    def run(self, engine: Engine, items: Sequence[Item], samples: Sequence[int], seed: int) -> list[Outcome]:
        """Run one batch; one outcome an item, in order.

        Args:
            engine: a model under one policy.
            items: the batch.
            samples: sample number of each (repeated runs of a problem have different ones).
            seed: seed of everything random that is not the policy's (token sampling, heads of a probe).
        """
        ...
