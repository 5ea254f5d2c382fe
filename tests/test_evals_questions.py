"""Answers are read and graded as the chosen grader says, and by no other."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from kvkeep.evals.tasks import make_task
from kvkeep.evals.tasks.questions import Questions, _rows, final_answer, judge, last_boxed, last_number


@pytest.mark.parametrize(
    ("grader", "trace", "answer", "told"),
    [
        ("boxed", r"so \boxed{18}", "18", (True, True)),
        ("boxed", r"\boxed{17} no, \boxed{\frac{1}{2}}", r"\frac{1}{2}", (True, True)),
        ("boxed", r"so \boxed{1,800.0}", "1800", (True, True)),
        ("boxed", "so 18", "18", (False, False)),  # no other grader stands in
        ("boxed", r"\boxed{18", "18", (False, False)),
        ("number", "it is 3 and then $1,234.50.", "1234.5", (True, True)),
        ("number", "it is -3", "3", (True, False)),
        ("number", "no idea", "3", (False, False)),
    ],
)
def test_graders(grader: str, trace: str, answer: str, told: tuple[bool, bool]) -> None:
    assert judge(grader, trace, answer) == told


def test_answers_of_known_sets() -> None:
    assert final_answer("16 - 3 = <<16-3=13>>13\n#### 1,080") == "1,080"
    assert final_answer(r"we get \boxed{\left( 3, \frac{\pi}{2} \right)}.") == r"\left( 3, \frac{\pi}{2} \right)"
    assert final_answer(" 42 ") == "42"
    assert last_boxed(r"\boxed{a{b}c} d") == "a{b}c"
    assert last_number("1 2 3.5x") == "3.5"


@pytest.mark.parametrize(
    ("trace", "answer", "told"),
    [
        (r"so \boxed{\frac{2}{4}}", r"\frac{1}{2}", (True, True)),
        (r"so \boxed{(1, 3)}", "(3, 1)", (True, False)),
        ("I do not know.", "3", (False, False)),
    ],
)
def test_math_verify_knows_equal_answers(trace: str, answer: str, told: tuple[bool, bool]) -> None:
    assert judge("math-verify", trace, answer) == told


def test_the_missing_grader_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install math-verify.*or say grader=boxed"):
        make_task("questions:path=x.jsonl")


def test_bad_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"question": "x"}\n')
    with pytest.raises(ValueError, match="row 0 has none of answer, solution"):
        Questions(str(file), grader="number")._item(None, 0, _rows(str(file), "test", None)[0])  # type: ignore[arg-type]
    torn = tmp_path / "torn.jsonl"
    torn.write_text(json.dumps({"question": "x", "answer": "1"}) + "\n{")
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        _rows(str(torn), "test", None)
    with pytest.raises(ValueError, match="length must lie in"):
        Questions("x", grader="number", max_new_tokens=10, length=11)
    with pytest.raises(ValueError, match="temperature must be"):
        Questions("x", grader="number", temperature=-1)
