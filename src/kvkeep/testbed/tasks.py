"""Abacus problems: numbered-line programs whose solution must be reasoned out line by line.

A prompt defines variables, one a line, in shuffled order (``#3 k = a + f``); values are digits, arithmetic is mod 10.
The ideal trace takes the lines in order, looks the operands up, computes, and every m steps restates all values so
far: the restate mode ``r{m}`` is the knob of *textual* redundancy (``r0``: every value is said once).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum

from .vocab import EOS, MAX_LINES, MODES, VARIABLES


class Kind(IntEnum):
    """What it takes to predict a token of the ideal trace."""

    GIVEN = 0  # prompt, notes and questions: cannot be predicted, carries no loss
    FORM = 1  # syntax, line numbers, names said a moment ago
    LINE = 2  # read a line of the prompt
    LOOKUP = 3  # read a value said earlier in the trace
    SUM = 4  # arithmetic on operands just looked up
    RECAP = 5  # read a value for a recap
    RECALL = 6  # answer a question after the end


@dataclass(frozen=True)
class Spec:
    """Knobs of a problem.

    Args:
        n: program lines, 3 to 40.
        mode: ``r0`` restates nothing, ``r8``, ``r4``, ``r2``, ``r1`` restate every so many steps.
        distractors: prompt lines that define variables nobody uses.
        note_after: a passcode is noted in the trace after this step (None: no note).
        questions: asked after the answer: ``passcode`` or numbers of lines whose value is asked.
    """

    n: int = 16
    mode: str = "r2"
    distractors: int = 0
    note_after: int | None = None
    questions: tuple[str | int, ...] = ()

    def __post_init__(self) -> None:
        if not 3 <= self.n <= MAX_LINES:
            raise ValueError(f"n must lie in 3..{MAX_LINES} lines, got {self.n}")
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, got {self.mode!r}")
        if not 0 <= self.distractors <= len(VARIABLES) - self.n:
            raise ValueError(
                f"distractors must lie in 0..{len(VARIABLES) - self.n} at n={self.n}, got {self.distractors}"
            )
        if self.note_after is not None and not 1 <= self.note_after <= self.n:
            raise ValueError(f"note_after must name a step in 1..{self.n}, got {self.note_after}")
        for question in self.questions:
            if question == "passcode" and self.note_after is None:
                raise ValueError("a question for the passcode needs note_after")
            if question != "passcode" and not (isinstance(question, int) and 1 <= question <= self.n):
                raise ValueError(f"a question is 'passcode' or a line in 1..{self.n}, got {question!r}")

    @property
    def every(self) -> int:
        """Steps between two recaps; 0: none."""
        return int(self.mode[1:])


@dataclass(frozen=True)
class Line:
    """``name = left sign right``, or ``name = value`` where ``left`` is empty."""

    number: int
    name: str
    value: int
    left: str = ""
    sign: str = ""
    right: str = ""

    @property
    def right_side(self) -> list[str]:
        """Tokens after the equals sign."""
        return [self.left, self.sign, self.right] if self.left else [str(self.value)]


@dataclass(frozen=True)
class Problem:
    """One problem with its ideal solution.

    Attributes:
        spec: its knobs.
        lines: the program, in order.
        shown: the prompt's lines as token lists, in the order shown.
        passcode: three digits, noted where the spec says so.
        id: names it for good: spec, seed and index.
    """

    spec: Spec
    lines: tuple[Line, ...]
    shown: tuple[tuple[str, ...], ...]
    passcode: tuple[int, int, int]
    id: str = ""
    values: dict[str, int] = field(default_factory=dict, compare=False)

    @property
    def answer(self) -> str:
        """The asked variable's value, one digit."""
        return str(self.lines[-1].value)

    @property
    def prompt(self) -> str:
        """What the user says (the chat template adds the roles)."""
        words = [self.spec.mode, *(word for line in self.shown for word in line), "?", self.lines[-1].name]
        return " ".join(words)

    @property
    def trace(self) -> str:
        """The ideal trace, end token and questions included."""
        return " ".join(word for word, _ in self.solution())

    def solution(self) -> list[tuple[str, Kind]]:
        """The ideal trace token by token, each with what it takes to predict it."""
        found: list[tuple[str, Kind]] = []
        for done, line in enumerate(self.lines, start=1):
            found += self._step(line)
            if self.spec.every and done % self.spec.every == 0:
                found += self._recap(done)
            if self.spec.note_after == done:
                found += [(word, Kind.GIVEN) for word in self.note]
        last = self.lines[-1]
        found += [("</think>", Kind.FORM), ("answer", Kind.FORM), (last.name, Kind.FORM)]
        found += [(self.answer, Kind.LOOKUP), (EOS, Kind.FORM)]
        for question in self.spec.questions:
            found += self._question(question)
        return found

    @property
    def note(self) -> list[str]:
        """Tokens that note the passcode."""
        return ["note", "passcode", *map(str, self.passcode), "."]

    def _step(self, line: Line) -> list[tuple[str, Kind]]:
        F, V = Kind.FORM, Kind.LOOKUP
        found = [(f"#{line.number}", F), (line.name, Kind.LINE), ("=", F)]
        found += [(word, Kind.LINE) for word in line.right_side] + [(";", F)]
        if line.left:
            left, right = self.values[line.left], self.values[line.right]
            found += [(line.left, F), (str(left), V), (",", F), (line.right, F), (str(right), V), (";", F)]
            found += [(str(left), F), (line.sign, F), (str(right), F), ("=", F), (str(line.value), Kind.SUM), (";", F)]
        return [*found, (line.name, F), (str(line.value), F), (".", F)]

    def _recap(self, done: int) -> list[tuple[str, Kind]]:
        F = Kind.FORM
        found = [("recap", F), (f"#{done}", F), (":", F)]
        for line in self.lines[:done]:
            found += [(f"#{line.number}", F), (line.name, Kind.RECAP), (str(line.value), Kind.RECAP)]
        return [*found, (".", F)]

    def _question(self, question: str | int) -> list[tuple[str, Kind]]:
        G, R = Kind.GIVEN, Kind.RECALL
        if question == "passcode":
            name, said = "passcode", list(map(str, self.passcode))
        else:
            line = self.lines[int(question) - 1]
            name, said = line.name, [str(line.value)]
        return [("?", G), (name, G), (":", G), (name, R), *((word, R) for word in said), (EOS, R)]


def make_problem(spec: Spec, seed: int, index: int) -> Problem:
    """The problem with this number: a pure function of the arguments, the same on every machine.

    Args:
        spec: its knobs.
        seed: seed of the set it belongs to.
        index: its number in the set, from 0.
    """
    # Specs that differ in notes and questions alone share their program, so arms can be paired.
    core = replace(spec, note_after=None, questions=())
    name = f"n{core.n}-{core.mode}-d{core.distractors}-s{seed}-{index}"
    return draw_problem(spec, random.Random(f"abacus-{name}"), name)


def draw_problem(spec: Spec, rng: random.Random, name: str = "") -> Problem:
    """A problem drawn from ``rng``; see :func:`make_problem` for one that can be named."""
    names = rng.sample(VARIABLES, spec.n + spec.distractors)
    lines: list[Line] = []
    for i, variable in enumerate(names[: spec.n]):
        lines.append(_literal(rng, i + 1, variable) if i < 2 else _sum(rng, i + 1, variable, lines))
    shown = [(f"#{line.number}", line.name, "=", *line.right_side) for line in lines]
    for variable in names[spec.n :]:
        left, right = rng.sample(names[: spec.n], 2)
        shown.append(("*", variable, "=", left, rng.choice("+-"), right))
    rng.shuffle(shown)
    passcode = (rng.randrange(10), rng.randrange(10), rng.randrange(10))
    values = {line.name: line.value for line in lines}
    return Problem(spec, tuple(lines), tuple(shown), passcode, name, values)


def problems(spec: Spec, seed: int, count: int) -> Iterator[Problem]:
    """The first ``count`` problems of a set; all prompts of one spec have the same number of tokens."""
    return (make_problem(spec, seed, index) for index in range(count))


def _literal(rng: random.Random, number: int, name: str) -> Line:
    return Line(number, name, rng.randrange(10))


def _sum(rng: random.Random, number: int, name: str, earlier: list[Line]) -> Line:
    """Each line needs the one before it, so that the answer needs every line."""
    pair = [earlier[-1], earlier[rng.randrange(len(earlier) - 1)]]
    rng.shuffle(pair)
    sign = rng.choice("+-")
    value = (pair[0].value + (pair[1].value if sign == "+" else -pair[1].value)) % 10
    return Line(number, name, value, pair[0].name, sign, pair[1].name)
