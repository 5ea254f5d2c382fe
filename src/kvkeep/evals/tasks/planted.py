"""A fact of an abacus trace, asked for at its end: noted once, restated, or kept in chosen heads alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ...engine import Engine, Forced
from ...settings import Settings
from ...testbed.tasks import Problem, Spec, problems
from ...testbed.vocab import IDS
from ..spelling import canonical
from ..task import Item, Outcome
from .abacus import is_abacus
from .text import chat_prompt

NATURAL = "natural"


@dataclass(frozen=True)
class Asked:
    """A forced trace and what is looked at, as indices in it.

    Attributes:
        trace: token ids, the question and its answer included.
        note: first and last token of the note.
        answer: the tokens asked for.
        said: last token of each place that states the fact before the question.
    """

    trace: tuple[int, ...]
    note: tuple[int, int]
    answer: tuple[int, ...]
    said: tuple[int, ...]


@dataclass(frozen=True)
class Planted:
    """The ideal trace is forced; the score is 1 if every token asked for is the most probable one in its place.

    The trace notes a passcode (``note passcode 4 7 1 .``), goes on to the answer, and asks. With ``heads=j`` the
    note's entries are kept in j heads of every evicting layer and go first in all others; which heads, is drawn for
    each problem (one draw for a whole batch gives all right or all wrong), and the draws for j are among those for
    j + 1. With ``heads=natural`` the policy alone decides: what becomes of a fact that is said once.

    Args:
        n: program lines.
        mode: how often the trace restates its values (never the passcode): r0, r8, r4, r2, r1.
        heads: ``natural`` or j, 0 up to the model's KV heads.
        note_after: the step that the note follows.
        layers: ``independent``: each layer draws its j heads; ``same``: all layers keep the same ones.
        line: 0 asks for the passcode; k for the value of line k, which the trace restates as its mode says. The trace
            is the same but for the question. Needs ``heads=natural``.
        seed: seed of the problem set; None: the run's seed.

    Raises:
        ValueError: a value is out of range; see also :class:`~kvkeep.testbed.tasks.Spec`.
    """

    n: int = 16
    mode: str = "r2"
    heads: int | str = NATURAL
    note_after: int = 4
    layers: str = "independent"
    line: int = 0
    seed: int | None = None

    metric: ClassVar[str] = "accuracy"
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    higher_is_better: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.spec  # noqa: B018 - checks the values
        whole = isinstance(self.heads, int) and not isinstance(self.heads, bool) and self.heads >= 0
        if self.heads != NATURAL and not whole:
            raise ValueError(f"heads is a number of KV heads or {NATURAL}, got {self.heads!r}")
        if self.layers not in ("independent", "same"):
            raise ValueError(f"layers must be independent or same, got {self.layers!r}")
        if self.line and self.heads != NATURAL:
            raise ValueError("line asks for a value that is said several times, heads keeps the note: use one of them")

    @property
    def spec(self) -> Spec:
        """The knobs of its problems."""
        return Spec(self.n, self.mode, note_after=self.note_after, questions=(self.line or "passcode",))

    @property
    def name(self) -> str:
        """Canonical text; n, mode and heads are always in it."""
        return canonical("planted", self, "n", "mode", "heads")

    def items(self, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> list[Item]:
        """The first ``count`` problems, all of one length; their programs are those of ``abacus``.

        Raises:
            ValueError: the tokenizer is not abacus's.
        """
        if not is_abacus(tokenizer):
            raise ValueError("planted facts need abacus's vocabulary: use --model abacus, or the task passcode")
        found = []
        for problem in problems(self.spec, seed if self.seed is None else self.seed, count):
            prompt = chat_prompt(tokenizer, problem.prompt)
            asked = locate(problem, self.line)
            found.append(Item(problem.id, prompt, len(prompt) + len(asked.trace), asked))
        return found

    def run(self, engine: Engine, items: Sequence[Item], samples: Sequence[int], seed: int) -> list[Outcome]:
        """Force the traces and read the answers.

        Raises:
            ValueError: more heads than the model has, or a note that cannot be gone from a head when it is asked for.
        """
        keep, forget = self._masks(engine, items, samples, seed)
        prompts, traces = [item.prompt for item in items], [item.data.trace for item in items]
        forced = engine.force(prompts, traces, samples, keep=keep, forget=forget)
        if forget is not None:
            for item, one in zip(items, forced, strict=True):
                _check_gone(engine.settings, item, one)
        return [self._outcome(item.data, one) for item, one in zip(items, forced, strict=True)]

    def _masks(
        self, engine: Engine, items: Sequence[Item], samples: Sequence[int], seed: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """``keep`` and ``forget``, bool [R, L or 1, H or 1, T]: the note's positions, in the heads drawn and in all."""
        if isinstance(self.heads, str):
            return None, None
        shape = engine.kv_shape
        if self.heads > shape[1]:
            raise ValueError(f"heads={self.heads}: the model has {shape[1]} KV heads a layer")
        length = max(item.length for item in items)
        forget = torch.zeros(len(items), 1, 1, length, dtype=torch.bool)
        drawn = torch.zeros(len(items), *shape, 1, dtype=torch.bool)
        for row, (item, sample) in enumerate(zip(items, samples, strict=True)):
            first, last = (len(item.prompt) + i for i in item.data.note)
            forget[row, ..., first : last + 1] = True
            for layer, heads in enumerate(self.draw(item, sample, seed, shape)):
                drawn[row, layer, heads] = True
        return drawn & forget, forget

    def draw(self, item: Item, sample: int, seed: int, shape: tuple[int, int]) -> list[list[int]]:
        """Heads that keep the note, a list for each layer."""
        assert isinstance(self.heads, int)
        rng = random.Random(f"planted-{seed}-{item.id}-{sample}")
        orders = [rng.sample(range(shape[1]), shape[1]) for _ in range(shape[0])]
        return [(orders[0] if self.layers == "same" else order)[: self.heads] for order in orders]

    @staticmethod
    def _outcome(asked: Asked, forced: Forced) -> Outcome:
        where, told = list(asked.answer), asked.said[-1]
        right = forced.greedy[where]
        return Outcome(
            score=float(right.all()),
            answered=True,
            truncated=False,
            tokens=len(asked.trace),
            stats=forced.stats,
            metrics={
                "logprob": float(forced.logprobs[where].sum()),
                "tokens_right": float(right.float().mean()),
                "said": float(len(asked.said)),
                "distance": float(where[0] - told),  # tokens since the fact was last said
                "distance_rounds": float(forced.rounds[where[0]] - forced.rounds[told + 1]),
            },
        )


def locate(problem: Problem, line: int) -> Asked:
    """The ideal trace of a problem with one question, and where in it are the note, the answer, and the fact.

    Args:
        problem: with a note and a question.
        line: the line whose value is asked for; 0: the passcode.
    """
    words = [word for word, _ in problem.solution()]
    note = words.index("note")
    asked = len(words) - 1 - words[::-1].index("?")
    fact = [str(problem.lines[line - 1].value)] if line else list(map(str, problem.passcode))
    name = problem.lines[line - 1].name if line else "passcode"
    first = asked + 4  # ? name : name VALUE
    said = [i for i in range(asked) if words[i : i + 1 + len(fact)] == [name, *fact]]
    return Asked(
        tuple(IDS[word] for word in words),
        (note, note + len(problem.note) - 1),
        tuple(range(first, first + len(fact))),
        tuple(i + len(fact) for i in said),
    )


def _check_gone(settings: Settings, item: Item, forced: Forced) -> None:
    """A note that the window still protects when it is asked for would be kept in every head."""
    budget = settings.make_budget()
    if budget is None:
        return
    first, last = item.data.note
    when = [t for t in range(last + 1, item.data.answer[0] + 1) if forced.rounds[t] > forced.rounds[t - 1]]
    # A round ran before the forward that predicted t, when the tokens up to t - 2 were cached; the newest w stayed.
    evicting = sum(t - 1 - budget.window > last for t in when)
    if evicting * budget.every < last - first + 1:
        raise ValueError(
            f"problem {item.id}: {evicting} rounds ran after the note had left the window and before it was asked for, "
            "too few for it to be gone: use a smaller note_after, longer problems or a smaller budget"
        )
