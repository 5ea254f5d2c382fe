"""Abacus problems, solved with chain of thought and graded step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from ...engine import Engine, Sampling
from ...testbed.graders import grade
from ...testbed.tasks import Problem, Spec, problems
from ...testbed.vocab import EOS, IDS, WORDS
from ..spelling import canonical
from ..task import Item, Outcome
from .text import chat_prompt

#: A trace may be this much longer than the ideal one before it counts as truncated.
SLACK = 1.25


def is_abacus(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer is abacus's: a chat template, and every word under its own id."""
    known = tokenizer.convert_tokens_to_ids(list(WORDS)) == [IDS[word] for word in WORDS]
    return bool(tokenizer.chat_template) and known


@dataclass(frozen=True)
class Abacus:
    """Numbered-line programs; the score is 1 for the right answer. Greedy.

    Args:
        n: program lines.
        mode: how often the trace restates its values: r0 (never), r8, r4, r2, r1.
        distractors: prompt lines nobody needs.
        seed: seed of the problem set; None: the run's seed (``--seed``, 0 by default), so that two runs with one
            seed see the same problems whatever their arms.

    Raises:
        ValueError: see :class:`~kvkeep.testbed.tasks.Spec`.
    """

    n: int = 16
    mode: str = "r2"
    distractors: int = 0
    seed: int | None = None

    metric: ClassVar[str] = "accuracy"
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    higher_is_better: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.spec  # noqa: B018 - checks the values

    @property
    def spec(self) -> Spec:
        """The knobs of its problems."""
        return Spec(self.n, self.mode, self.distractors)

    @property
    def name(self) -> str:
        """Canonical text; n and mode are always in it."""
        return canonical("abacus", self, "n", "mode")

    def items(self, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> list[Item]:
        """The first ``count`` problems; all have the same prompt length and the same ideal length.

        Raises:
            ValueError: the tokenizer is not abacus's.
        """
        if not is_abacus(tokenizer):
            raise ValueError("abacus problems need abacus's vocabulary: use --model abacus, or another task")
        found = []
        for problem in problems(self.spec, seed if self.seed is None else self.seed, count):
            prompt = chat_prompt(tokenizer, problem.prompt)
            found.append(Item(problem.id, prompt, len(prompt) + len(problem.solution()), problem))
        return found

    def most_tokens(self, item: Item) -> int:
        """Tokens of the trace at most; the runner compares prompt and trace with the model's context."""
        return ceil(SLACK * len(item.data.solution()))

    def run(self, engine: Engine, items: Sequence[Item], samples: Sequence[int], seed: int) -> list[Outcome]:
        """Generate greedily and grade."""
        limits = {self.most_tokens(item) for item in items}
        assert len(limits) == 1  # one spec: all ideal traces are equally long
        limit = limits.pop()
        made = engine.generate([item.prompt for item in items], samples, Sampling(max_new_tokens=limit, seed=seed))
        return [self._outcome(item.data, sample, limit) for item, sample in zip(items, made, strict=True)]

    @staticmethod
    def _outcome(problem: Problem, sample: Any, limit: int) -> Outcome:
        told = grade(problem, sample.text)
        return Outcome(
            score=float(told.correct),
            answered=told.answered,
            truncated=len(sample.tokens) >= limit and sample.tokens[-1] != IDS[EOS],
            tokens=len(sample.tokens),
            text=sample.text,
            stats=sample.stats,
            metrics={"lines": told.lines, "steps": told.steps, "consistent": told.consistent},
        )
