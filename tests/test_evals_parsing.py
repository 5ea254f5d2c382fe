"""What users type: arms, tasks and primary comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from comparing import abacus_model, fake, fake_config  # noqa: F401 - fixtures
from kvkeep.evals.arms import Arm, parse_arms
from kvkeep.evals.config import Primary
from kvkeep.evals.spelling import parse, spell
from kvkeep.evals.tasks import make_task, with_options
from kvkeep.settings import Settings


@pytest.mark.parametrize("text", ["random", "random:draw=model,protect=none", "x:a=1,b=true,c=null,d=0.5,e=sinks:4"])
def test_a_text_survives_a_round_trip(text: str) -> None:
    assert spell(*parse(text, "arm")) == text


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("full", Settings("full", seed=3)),
        ("random", Settings("random", budget=64, buffer=8, seed=3)),
        ("random:protect=none", Settings("random", budget=64, buffer=8, seed=3, protect="none")),
        ("random:draw=model", Settings("random", budget=64, buffer=8, seed=3, options={"draw": "model"})),
        ("random:groups=4,seed=9", Settings("random", budget=64, buffer=8, seed=9, options={"groups": 4})),
        ("recency:buffer=4,window=6", Settings("recency", budget=64, buffer=4, window=6, seed=3)),
        ("random:unit=4", Settings("random", budget=64, buffer=8, seed=3, options={"unit": 4})),
        ("recency:protect=prompt+sinks:2", Settings("recency", budget=64, buffer=8, seed=3, protect="prompt+sinks:2")),
    ],
)  # fmt: skip
def test_an_arm_is_settings_without_a_budget(text: str, settings: Settings) -> None:
    arm = Arm.parse(text)
    assert arm.settings(64, 8, 3) == settings
    assert arm.label == text


def test_a_label_is_not_an_option() -> None:
    arm = Arm.parse("random:draw=model,label=shared")
    assert (arm.label, arm.text, arm.protect) == ("shared", "random:draw=model", "prompt")


def test_no_label_hides_what_an_arm_costs() -> None:
    hidden = Arm.parse("random:scope=trace,buffer=32,protect=none,label=random")
    assert hidden.label == "random:scope=trace,buffer=32"
    assert Arm.parse("random:growth=2.0,label=x").label == "x:growth=2.0"


def test_an_arm_may_run_its_papers_own_schedule() -> None:
    """Buffer, window, growth, scope and protection of the paper; what the arm says itself outranks it."""
    arm = Arm.parse("rkv:published=true")
    assert (arm.label, arm.text, arm.protect, arm.schedule) == ("rkv:published=true", "rkv", "none", "published")
    made = arm.settings(512, 16, 3)
    assert (made.budget, made.buffer, made.window, made.protect, made.seed) == (512, 128, 8, "none", 3)
    own = Arm.parse("rkv:published=true,buffer=32,protect=prompt,label=x")
    assert own.label == "x:buffer=32,published=true"
    assert (own.settings(512, 16, 3).buffer, own.settings(512, 16, 3).window, own.protect) == (32, 8, "prompt")
    grown = Arm.parse("rpc:published=true").settings(2048, 16, 0)
    assert (grown.budget, grown.buffer, grown.growth, grown.scope, grown.protect) == (288, 1024, 4.0, "trace", "prompt")
    assert Arm.parse("rkv").schedule == "common"


def test_a_method_of_several_forms_says_which() -> None:
    assert Arm.parse("h2o").label == Arm.parse("h2o").text == "h2o:count=cumulative"
    assert Arm.parse("h2o:protect=none").label == "h2o:count=cumulative,protect=none"
    assert Arm.parse("h2o:count=mean").label == "h2o:count=mean"


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["rkv:published=1"], "published is true or false, got 1"),
        (["randm"], "did you mean random?"),
        (["random:drw=model"], "did you mean draw?"),
        (["random:protct=none"], "did you mean protect?"),
        (["random:draw=modl"], "draw must be one of head, layer, model"),
        (["random:protect=prompts"], "protection 'prompts' is not understood"),
        (["random:budget=64"], "pass it as --budget"),
        (["random:draw"], "'draw' is not key=value"),
        (["random:draw=head,draw=model"], "draw is given twice"),
        ([":draw=head"], "an arm is NAME"),
        (["full:protect=none"], "full evicts nothing"),
        (["random", "random"], "two arms are called 'random'"),
        (["random", "recency:label=random"], "two arms are called 'random'"),
        (["random:label=two words"], "a label has no spaces"),
        ([], "at least one --policy"),
    ],
)
def test_a_bad_arm_says_what_to_do(texts: list[str], says: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_arms(texts)
    assert says.replace("an arm", "") in str(error.value).replace("a arm", "")


def test_tasks_by_name() -> None:
    task = make_task("abacus:mode=r0,n=8,distractors=2")
    assert task.name == "abacus:n=8,mode=r0,distractors=2"
    assert make_task(task.name) == task
    assert make_task("abacus").name == "abacus:n=16,mode=r2"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("abacs", "did you mean abacus?"),
        ("abacus:mod=r0", "did you mean mode?"),
        ("abacus:mode=r3", "mode must be one of r0"),
        ("abacus:n=99", "n must lie in 3..40"),
        ("questions", "needs path=..."),
        ("questions:path=5,grader=number", "path must be text, got 5"),
        ("abacus:n=16.5", "n must be a whole number, got 16.5"),
        ("abacus:n=x", "n must be a whole number, got 'x'"),
        ("abacus:seed=true", "seed must be a whole number, got True"),
        ("planted:heads=1.5", "heads must be a whole number or text, got 1.5"),
        ("questions:path=x,grader=numbr", "did you mean number?"),
    ],
)
def test_a_bad_task_says_what_to_do(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("?", r"\?")):
        make_task(text)


def test_options_of_the_command_line_go_to_tasks_that_take_them() -> None:
    text = with_options("questions:path=x.jsonl,grader=boxed", {"temperature": 0.6})
    assert make_task(text).name == "questions:path=x.jsonl,grader=boxed,temperature=0.6"
    with pytest.raises(ValueError, match="task abacus takes no temperature: leave --temperature out"):
        with_options("abacus", {"temperature": 0.6})
    with pytest.raises(ValueError, match="give one of them"):
        with_options("questions:path=x,temperature=1.0", {"temperature": 0.6})


def test_primary_comparisons() -> None:
    labels = ["random", "recency", "random:draw=model"]
    assert Primary.parse("random vs random:draw=model", labels) == Primary("random", "random:draw=model")
    assert Primary.parse("random vs recency @2x", labels) == Primary("random", "recency", 2.0)
    assert Primary.parse("random vs recency@4", labels) == Primary("random", "recency", 4.0)
    for text, says in [
        ("random", "is 'A vs B'"),
        ("random vs recensy", r"did you mean recency\?"),
        ("random vs random", "with itself"),
    ]:
        with pytest.raises(ValueError, match=says):
            Primary.parse(text, labels)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"problems": 0}, "problems must be at least 2"),
        ({"compressions": ()}, "give --compression"),
        ({"budgets": (64,)}, "one of the two"),
        ({"budgets": (0,), "compressions": ()}, "at least 1, got 0"),
        ({"budgets": (64, -5), "compressions": ()}, "at least 1, got -5"),
        ({"compressions": (0.5,)}, "at least 1"),
        ({"compressions": (2.0, 2.0)}, "given twice"),
        ({"tasks": ("fake", "fake")}, "a task is given twice"),
        ({"check": 17}, "at most 16"),
        ({"primary": ("random vs recency @3",)}, "3 is not among 2, 4"),
    ],
)
@pytest.mark.usefixtures("fake")
def test_values_that_do_not_fit(values: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        fake_config(tmp_path, **values)
