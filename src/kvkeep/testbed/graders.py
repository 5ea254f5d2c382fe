"""Graders of abacus: was the prompt still there, was each step right, is the answer right."""

from __future__ import annotations

from dataclasses import dataclass

from .tasks import Problem


@dataclass(frozen=True)
class Grade:
    """What a trace got right.

    Attributes:
        correct: the answer after ``</think>`` is the problem's.
        answered: an answer was given in the right form for the asked variable.
        lines: share of the program's lines that the trace copied as the prompt has them (is the prompt still there?).
        steps: share of the lines whose value the trace stated rightly at the end of its step.
        consistent: share of the computed steps whose sum is right for the operands the trace itself looked up
            (a wrong step with a right sum was a failed lookup, not failed arithmetic).
    """

    correct: bool
    answered: bool
    lines: float
    steps: float
    consistent: float


def grade(problem: Problem, trace: str) -> Grade:
    """Grade a generated trace, as text whose words are separated by spaces (end token and padding left out)."""
    thought, closed, answer = trace.partition("</think>")
    words = answer.split()
    name = problem.lines[-1].name
    answered = bool(closed) and words[:2] == ["answer", name] and len(words) >= 3 and words[2].isdigit()
    steps = _steps(thought)
    lines = right = sums = computed = 0
    for line in problem.lines:
        step = steps.get(line.number)
        if step is None:
            continue
        program, body, stated = step
        lines += program == [line.name, "=", *line.right_side]
        right += stated == [line.name, str(line.value)]
        if (told := _sum_of(body)) is not None:
            computed += 1
            sums += told
    n = len(problem.lines)
    return Grade(
        answered and words[2] == problem.answer,
        answered,
        lines / n,
        right / n,
        sums / computed if computed else 0.0,
    )


def _steps(thought: str) -> dict[int, tuple[list[str], list[str], list[str]]]:
    """Steps by line number: what was copied, the middle parts, what was stated last. Recaps and notes are skipped."""
    found: dict[int, tuple[list[str], list[str], list[str]]] = {}
    for sentence in thought.split(" . "):
        words = sentence.split()
        if not words or not words[0].startswith("#") or not words[0][1:].isdigit():
            continue
        parts = [part.split() for part in " ".join(words).removesuffix(" .").split(" ; ")]
        middle = parts[2] if len(parts) == 4 else []
        found.setdefault(int(words[0][1:]), (parts[0][1:], middle, parts[-1]))
    return found


def _sum_of(words: list[str]) -> bool | None:
    """Whether ``3 + 6 = 9`` is right mod 10; None if it is no sum."""
    if len(words) != 5 or words[1] not in "+-" or words[3] != "=" or not all(words[i].isdigit() for i in (0, 2, 4)):
        return None
    left, right, value = int(words[0]), int(words[2]), int(words[4])
    return (left + right if words[1] == "+" else left - right) % 10 == value % 10
