"""A passcode said once inside long prose, asked for at the end."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from ...draws import stream_of
from ...engine import Engine, Sample, Sampling
from ..spelling import canonical
from ..task import Item, Outcome
from .text import chat_frame, check_counts, encode, join, read_passages

_DIGITS = 5
# Chosen on SmolLM2 with the full cache alone (1,000 tokens, 8 problems): 6 right, none cut off. "What is the passcode?"
# had 5 right and 2 cut off; beginning the answer for the model ("The passcode is") had 7, but asks for less.
_QUESTION = "What is the passcode mentioned in the text above?"


@dataclass(frozen=True)
class Hidden:
    """Where a passcode is, and what comes behind the prompt.

    Attributes:
        passcode: its digits.
        forced: what the trace is forced to begin with; empty where all of the text is prompt.
        depth: share of the text before the sentence that says it.
        end: the token that ends an answer.
    """

    passcode: str
    forced: tuple[int, ...]
    depth: float
    end: int | None


@dataclass(frozen=True)
class Passcode:
    """One user's message: prose, the passcode at a random depth, more prose, and the question. Greedy.

    The score is 1 if the answer has the five digits in order, with nothing but spaces and punctuation between them.
    Both places see the same tokens: with ``where=prompt`` all of them are prompt, which protection keeps (K must hold
    it); with ``where=trace`` the prompt is what the chat template puts before the message, and the message is forced
    as trace, so that the policy may lose the fact.

    Args:
        tokens: of the text, chat template and question included.
        where: ``prompt`` or ``trace``.
        answer: tokens of the answer at most.
        path: a JSONL file for the prose, see :func:`~kvkeep.evals.tasks.text.read_passages`.
        seed: seed of the problem set; None: the run's seed.

    Raises:
        ValueError: a value is out of range.
    """

    tokens: int = 1000
    where: str = "prompt"
    answer: int = 32
    path: str = ""
    seed: int | None = None

    metric: ClassVar[str] = "accuracy"
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    higher_is_better: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_counts(tokens=self.tokens, answer=self.answer)
        if self.where not in ("prompt", "trace"):
            raise ValueError(f"where must be prompt or trace, got {self.where!r}")

    @property
    def name(self) -> str:
        """Canonical text; tokens and where are always in it."""
        return canonical("passcode", self, "tokens", "where")

    def items(self, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> list[Item]:
        """The first ``count`` problems, each of exactly ``tokens`` tokens.

        Raises:
            ValueError: no file, no chat template, or too few tokens for anything but passcode and question.
        """
        seed = seed if self.seed is None else self.seed
        return [self._item(tokenizer, f"t{self.tokens}-s{seed}-{index}") for index in range(count)]

    def _item(self, tokenizer: PreTrainedTokenizerBase, name: str) -> Item:
        rng = random.Random(f"passcode-{name}")
        passcode = "".join(str(rng.randrange(10)) for _ in range(_DIGITS))
        header, footer = chat_frame(tokenizer)
        fact = encode(tokenizer, f"The passcode is {' '.join(passcode)}. Remember it.\n\n")
        footer = encode(tokenizer, f"\n\n{_QUESTION}") + footer
        room = self.tokens - len(header) - len(fact) - len(footer)
        if room < 1:
            raise ValueError(f"tokens={self.tokens} leaves no room for prose: use at least {self.tokens - room + 1}")
        before, behind = self._prose(tokenizer, rng, room)
        text = join([before, fact, behind, footer])
        whole = (*header, *text)
        prompt, forced = (whole, ()) if self.where == "prompt" else (tuple(header), text)
        hidden = Hidden(passcode, forced, (len(header) + len(before)) / self.tokens, tokenizer.eos_token_id)
        return Item(name, prompt, self.tokens + self.answer, hidden)

    def _prose(self, tokenizer: PreTrainedTokenizerBase, rng: random.Random, room: int) -> tuple[list[int], list[int]]:
        """``room`` tokens of shuffled problems and solutions, in two parts: cut between two, at a random depth."""
        passages = list(read_passages(self.path))
        rng.shuffle(passages)
        ids: list[int] = []
        cuts = [0]
        for problem, solution in passages:
            if len(ids) >= room:
                break
            ids += encode(tokenizer, f"{problem}\n{solution}\n\n")
            cuts.append(min(len(ids), room))
        if len(ids) < room:
            raise ValueError(f"the file holds {len(ids)} tokens of prose, {room} are needed: use a longer one")
        depth = rng.random() * room
        cut = max(c for c in cuts if c <= depth)
        return ids[:cut], ids[cut:room]

    def run(self, engine: Engine, items: Sequence[Item], samples: Sequence[int], seed: int) -> list[Outcome]:
        """Answer greedily and grade."""
        forced = [item.data.forced for item in items] if self.where == "trace" else None
        sampling = Sampling(max_new_tokens=self.answer, seed=seed)
        # In a trace all problems share the prompt, which draws depend on: the problem's own text tells them apart.
        pairs = zip(items, samples, strict=True)
        draws = samples if forced is None else [stream_of(item.data.forced, sample) for item, sample in pairs]
        made = engine.generate([item.prompt for item in items], draws, sampling, forced)
        return [self._outcome(item.data, sample) for item, sample in zip(items, made, strict=True)]

    def _outcome(self, hidden: Hidden, sample: Sample) -> Outcome:
        return Outcome(
            score=float(says(sample.text, hidden.passcode)),
            answered=any(c.isdigit() for c in sample.text),
            truncated=len(sample.tokens) >= self.answer and sample.tokens[-1] != hidden.end,
            tokens=len(sample.tokens),
            text=sample.text,
            stats=sample.stats,
            metrics={"depth": hidden.depth},
        )


def says(text: str, passcode: str) -> bool:
    """Whether a text has these digits in order, with nothing but spaces and punctuation between, as a whole number."""
    between = r"[\s,.;:*_\-]*".join(passcode)
    return re.search(rf"(?<!\d)(?<!\d[\s,\-]){between}(?![\s,\-]?\d)", text) is not None
