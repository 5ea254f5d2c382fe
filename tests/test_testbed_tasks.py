"""Abacus problems, their ideal traces, tokenizer and graders."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.testbed.graders import grade
from kvkeep.testbed.tasks import Kind, Spec, draw_problem, make_problem, problems
from kvkeep.testbed.vocab import IDS, MODES, VOCABULARY, WORDS, encode, encode_chat, tokenizer

SPECS = st.builds(
    lambda n, mode, distractors, note, asked: Spec(
        n, mode, distractors, min(note, n) if note else None, tuple(min(q, n) for q in asked)
    ),
    st.integers(3, 40),
    st.sampled_from(MODES),
    st.integers(0, 5),
    st.integers(0, 40),
    st.lists(st.integers(1, 40), max_size=3),
)


def run_program(prompt: str) -> str:
    """The answer, computed from the prompt's text alone."""
    words = prompt.split()
    asked = words[words.index("?") + 1]
    program: dict[str, list[str]] = {}
    i = 1
    while words[i] != "?":
        size = 6 if i + 4 < len(words) and words[i + 4] in "+-" else 4
        program[words[i + 1]] = words[i + 3 : i + size]
        i += size

    def value(name: str) -> int:
        right = program[name]
        if len(right) == 1:
            return int(right[0])
        left, sign, other = right
        return (value(left) + (value(other) if sign == "+" else -value(other))) % 10

    return str(value(asked))


@settings(max_examples=60, deadline=None)
@given(SPECS, st.integers(0, 2**31))
def test_answer_is_what_the_prompt_says(spec: Spec, seed: int) -> None:
    problem = draw_problem(spec, random.Random(seed))
    assert problem.answer == run_program(problem.prompt)
    assert f"</think> answer {problem.lines[-1].name} {problem.answer} <eos>" in problem.trace


@settings(max_examples=40, deadline=None)
@given(SPECS, st.integers(0, 2**31))
def test_ideal_trace_is_graded_right_and_every_word_is_known(spec: Spec, seed: int) -> None:
    problem = draw_problem(spec, random.Random(seed))
    encode_chat(problem.prompt)
    encode(problem.trace)
    said = grade(problem, problem.trace.partition(" <eos>")[0])
    assert said.correct
    assert said.answered
    assert said.lines == said.steps == said.consistent == 1


def test_a_set_is_a_function_of_its_seed_and_specs_share_programs() -> None:
    first = [p.prompt for p in problems(Spec(8, "r2"), 3, 5)]
    assert first == [p.prompt for p in problems(Spec(8, "r2"), 3, 5)]
    assert first != [p.prompt for p in problems(Spec(8, "r2"), 4, 5)]
    assert len(set(first)) == 5
    noted = make_problem(Spec(8, "r2", note_after=4, questions=("passcode",)), 3, 0)
    assert noted.prompt == first[0]
    # Pinned, so that a published set stays the set that was published.
    assert make_problem(Spec(3, "r0"), 0, 0).prompt == PINNED


PINNED = "r0 #1 t = 6 #3 a = t + u #2 u = 1 ? a"


@pytest.mark.parametrize("mode", MODES)
def test_prompts_of_a_spec_have_one_length(mode: str) -> None:
    lengths = {(len(encode_chat(p.prompt)), len(encode(p.trace))) for p in problems(Spec(16, mode, 2), 0, 20)}
    assert len(lengths) == 1


def test_restating_is_what_the_mode_says() -> None:
    for mode in MODES:
        every = int(mode[1:])
        problem = make_problem(Spec(16, mode), 0, 0)
        assert problem.trace.count("recap") == (16 // every if every else 0)


def test_note_and_questions() -> None:
    problem = make_problem(Spec(5, "r0", note_after=2, questions=("passcode", 1)), 0, 0)
    code = " ".join(map(str, problem.passcode))
    assert f"note passcode {code} ." in problem.trace
    first = problem.lines[0]
    assert problem.trace.endswith(
        f"? passcode : passcode {code} <eos> ? {first.name} : {first.name} {first.value} <eos>"
    )
    kinds = {word: kind for word, kind in problem.solution() if word in ("note", "?")}
    assert set(kinds.values()) == {Kind.GIVEN}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"n": 2}, "3..40"),
        ({"n": 41}, "3..40"),
        ({"mode": "r3"}, "r3"),
        ({"distractors": 37}, "36"),
        ({"note_after": 17}, "1..16"),
        ({"questions": ("passcode",)}, "note_after"),
        ({"questions": (17,)}, "1..16"),
    ],
)
def test_bad_specs_are_refused(values: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Spec(**values)  # type: ignore[arg-type]


def test_tokenizer_and_template_agree_with_the_plain_encoder() -> None:
    problem = make_problem(Spec(6, "r1", 1), 0, 0)
    made = tokenizer()
    chat = [{"role": "user", "content": problem.prompt}]
    ids = made.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert ids == encode_chat(problem.prompt)
    assert made.decode(encode(problem.trace), skip_special_tokens=True) == problem.trace.replace(" <eos>", "")
    assert len(WORDS) == len(set(WORDS)) == len(IDS) <= VOCABULARY
    with pytest.raises(ValueError, match="'zz'"):
        encode("a zz")


class TestGraders:
    problem = make_problem(Spec(4, "r2"), 0, 0)
    text = problem.trace.replace(" <eos>", "")

    def test_wrong_answer(self) -> None:
        wrong = str((int(self.problem.answer) + 1) % 10)
        said = grade(self.problem, self.text[: -len(self.problem.answer)] + wrong)
        assert (said.correct, said.answered, said.steps) == (False, True, 1)

    def test_no_answer(self) -> None:
        said = grade(self.problem, self.text.partition(" </think>")[0])
        assert (said.correct, said.answered, said.lines) == (False, False, 1)
        assert not grade(self.problem, self.text.replace("answer", "note")).answered
        assert grade(self.problem, "").lines == 0

    def test_a_line_copied_wrongly(self) -> None:
        line = self.problem.lines[2]
        right = " ".join([f"#3 {line.name} =", *line.right_side])
        other = "-" if line.sign == "+" else "+"
        said = grade(self.problem, self.text.replace(right, right.replace(line.sign, other)))
        assert said.lines == 0.75

    def test_a_failed_lookup_is_not_failed_arithmetic(self) -> None:
        line = self.problem.lines[3]
        steps = self.text.split(" . ")
        at = next(i for i, step in enumerate(steps) if step.startswith("#4 "))
        a, b = (self.problem.values[name] for name in (line.left, line.right))
        wrong = (a + 1) % 10
        value = (wrong + (b if line.sign == "+" else -b)) % 10
        lost = f"#4 {line.name} = {line.left} {line.sign} {line.right} ; {line.left} {wrong} , {line.right} {b} ; "
        lost += f"{wrong} {line.sign} {b} = {value} ; {line.name} {value}"
        said = grade(self.problem, " . ".join([*steps[:at], lost, *steps[at + 1 :]]))
        assert (said.steps, said.consistent) == (0.75, 1.0)
        bad_sum = lost.replace(f"= {value} ;", f"= {(value + 1) % 10} ;")
        assert grade(self.problem, " . ".join([*steps[:at], bad_sum, *steps[at + 1 :]])).consistent == 0.5
