"""Tasks that force a trace: their names and options, and planted facts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from forced import FULL, HEADS, LAYERS, RANDOM, abacus, bytes_tokenizer, close, problems_file, tiny
from kvkeep.engine import Forced
from kvkeep.evals.task import Task
from kvkeep.evals.tasks import make_task
from kvkeep.evals.tasks.passcode import Passcode
from kvkeep.evals.tasks.planted import Planted, locate
from kvkeep.evals.tasks.stream import Stream
from kvkeep.evals.tasks.text import read_passages
from kvkeep.hf.cache import EvictCache
from kvkeep.hf.engine import HFEngine
from kvkeep.testbed.tasks import Spec, make_problem
from kvkeep.testbed.vocab import IDS, VOCABULARY, WORDS, tokenizer


@pytest.fixture
def file(tmp_path: Path) -> str:
    return problems_file(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "planted:n=16,mode=r2,heads=natural",
        "planted:n=8,mode=r0,heads=3,note_after=2,layers=same,seed=4",
        "planted:n=16,mode=r8,heads=natural,line=3",
        "stream:tokens=2048",
        "stream:tokens=512,prompt=32,skip=300,path=x.jsonl",
        "passcode:tokens=1000,where=prompt",
        "passcode:tokens=2000,where=trace,answer=16,seed=1",
    ],
)
def test_a_name_makes_the_task_again(text: str) -> None:
    task = make_task(text)
    assert isinstance(task, Task)
    assert task.name == text
    assert make_task(task.name) == task


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("planted:heads=-1", "heads is a number of KV heads or natural"),
        ("planted:heads=some", "heads is a number of KV heads or natural"),
        ("planted:layers=all", "independent or same"),
        ("planted:line=3,heads=2", "use one of them"),
        ("planted:note_after=17", "note_after must name a step in 1..16"),
        ("planted:line=17", "a question is 'passcode' or a line in 1..16"),
        ("stream:tokens=64", "no room for a prompt of 64"),
        ("stream:tokens=0", "tokens must be a whole number of at least 1"),
        ("stream:skip=2047", "skip must lie in 64..2046"),
        ("passcode:where=here", "where must be prompt or trace"),
        ("passcode:answer=x", "answer must be a whole number, got 'x'"),
    ],
)
def test_bad_options(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_task(text)


def test_a_missing_or_broken_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.chdir(tmp_path)
    for task in (Stream(), Passcode()):
        with pytest.raises(ValueError, match=r"no file \.\./shared/data/gsm8k_test\.jsonl .*pass path=FILE"):
            task.items(bytes_tokenizer(), 1, 0)
    with pytest.raises(ValueError, match="no file nowhere: pass path=FILE"):
        read_passages("nowhere")
    for name, text in {"fields": '{"question": 1}\n', "json": "\n", "list": "[1]\n"}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=f"{name}, line 1: not a JSON object"):
            read_passages(name)
    (tmp_path / "empty").write_text("")
    with pytest.raises(ValueError, match="empty is empty"):
        read_passages("empty")
    with pytest.raises(ValueError, match="use a language model such as smollm2"):
        Stream(tokens=100, path=file).items(tokenizer(), 1, 0)
    (tmp_path / "math").write_text('{"problem": "1 + 1?", "solution": "<<1+1=2>>2"}\n')
    assert read_passages("math") == (("1 + 1?", "2"),)


# ---- planted facts -------------------------------------------------------------------------------


def test_positions_point_at_the_note_and_the_answer() -> None:
    for item in Planted(n=8, mode="r2", note_after=3).items(tokenizer(), 5, seed=2):
        words = [WORDS[token] for token in item.data.trace]
        first, last = item.data.note
        digits = [words[i] for i in item.data.answer]
        assert words[first : last + 1] == ["note", "passcode", *digits, "."]
        assert words[-8:] == ["?", "passcode", ":", "passcode", *digits, "<eos>"]
        assert item.data.said == (last - 1,)
        assert item.length == len(item.prompt) + len(words)
    for mode, least in (("r0", 1), ("r2", 4)):
        item = Planted(n=8, mode=mode, note_after=3, line=2).items(tokenizer(), 1, seed=2)[0]
        words = [WORDS[token] for token in item.data.trace]
        (answer,) = item.data.answer
        name, value = words[answer - 1], words[answer]
        assert words[answer - 4 : answer] == ["?", name, ":", name]
        assert [words[i - 1 : i + 1] for i in item.data.said] == [[name, value]] * len(item.data.said)
        assert len(item.data.said) >= least


def test_problems_are_those_of_abacus_and_questions_change_nothing_else() -> None:
    made = Planted(n=8, note_after=3).items(tokenizer(), 4, 7)
    assert made == Planted(n=8, note_after=3).items(tokenizer(), 4, 7)
    assert [i.id for i in made] == [i.id for i in make_task("abacus:n=8").items(tokenizer(), 4, 7)]
    assert len({i.id for i in made}) == 4
    other = Planted(n=8, note_after=3, line=2).items(tokenizer(), 4, 7)
    assert [i.data.trace[:-8] for i in made] == [i.data.trace[:-6] for i in other]
    with pytest.raises(ValueError, match="abacus's vocabulary"):
        Planted().items(bytes_tokenizer(), 1, 0)


@pytest.mark.parametrize("layers", ["independent", "same"])
def test_heads_are_drawn_for_each_problem(layers: str) -> None:
    items = Planted(n=8, note_after=3).items(tokenizer(), 30, 0)
    draws = {
        j: [Planted(heads=j, layers=layers).draw(i, 0, 5, (LAYERS, HEADS)) for i in items] for j in range(HEADS + 1)
    }
    for j, drawn in draws.items():
        assert all(len(set(heads)) == j for layer in drawn for heads in layer)
    assert len({str(d) for d in draws[2]}) > 8
    assert all(d[0] == d[1] == d[2] for d in draws[1]) == (layers == "same")
    for fewer, more in pairwise(range(HEADS + 1)):  # the draws are nested
        pairs = zip(draws[fewer], draws[more], strict=True)
        assert all(set(a) <= set(b) for one, two in pairs for a, b in zip(one, two, strict=True))
    chosen = torch.tensor([head for d in draws[1] for layer in d for head in layer])
    assert chosen.bincount(minlength=HEADS).min() > 5
    task = Planted(heads=2, layers=layers)
    assert task.draw(items[0], 0, 5, (3, 4)) == draws[2][0] != task.draw(items[0], 1, 6, (3, 4))


def test_the_note_stays_in_the_heads_drawn_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    task, kept = Planted(n=8, mode="r2", heads=2, note_after=2), []
    items = task.items(tokenizer(), 3, 0)
    shut = EvictCache.close

    def look(cache: EvictCache) -> None:
        if cache.rows and not kept:
            kept.extend(cache.kept_positions(i) for i in range(3))
        shut(cache)

    monkeypatch.setattr(EvictCache, "close", look)
    found = task.run(abacus(), items, [0, 0, 1], seed=9)
    for row, (item, sample) in enumerate(zip(items, [0, 0, 1], strict=True)):
        drawn = task.draw(item, sample, 9, (LAYERS, HEADS))
        for position in range(*(len(item.prompt) + i for i in item.data.note)):
            held = (kept[row] == position).any(-1)
            assert [[h for h in range(HEADS) if held[layer, h]] for layer in range(LAYERS)] == [
                sorted(d) for d in drawn
            ]
    assert all(o.stats["rounds"] > 5 and o.metrics["distance_rounds"] > 5 for o in found)


def test_scores_and_distances() -> None:
    task = Planted(n=8, mode="r2", note_after=2)
    items = task.items(tokenizer(), 3, 0)
    found = task.run(abacus(), items, [0, 0, 0], seed=0)
    forced = abacus().force([i.prompt for i in items], [i.data.trace for i in items])
    for item, one, told in zip(items, forced, found, strict=True):
        answer = list(item.data.answer)
        assert close(told.metrics["logprob"], float(one.logprobs[answer].sum()))
        assert told.score == float(one.greedy[answer].all())
        assert told.metrics["distance"] == answer[0] - item.data.note[1] + 1
        assert told.metrics["said"] == 1
        # rounds run every 8 tokens from 128 cached on
        last, asked = (len(item.prompt) + t - 1 for t in (item.data.note[1], answer[0]))
        expected = max(0, (asked - 128) // 8 + 1) - max(0, (last - 128) // 8 + 1)
        assert told.metrics["distance_rounds"] == expected
        assert told.stats["peak_entries"] == 128
    full = task.run(abacus(FULL), items, [0, 0, 0], seed=0)
    kept = replace(task, heads=HEADS).run(abacus(FULL), items, [0, 0, 0], seed=0)
    assert [o.metrics for o in full] == [o.metrics for o in kept]
    assert full[0].stats["rounds"] == 0
    assert not close(full[0].metrics["logprob"], found[0].metrics["logprob"], 1e-3)


class Told(HFEngine):
    """An engine that finds the tokens at some places most probable."""

    right: Sequence[int] = ()

    def force(self, prompts: Any, continuations: Any, samples: Any = None, **masks: Any) -> list[Forced]:
        greedy = torch.zeros(len(continuations[0]), dtype=torch.bool)
        greedy[list(self.right)] = True
        rounds = torch.zeros(len(greedy), dtype=torch.int32)
        return [Forced(torch.full((len(greedy),), -2.0), greedy, rounds) for _ in prompts]


def test_the_score_is_one_if_all_digits_are_right() -> None:
    items = Planted(n=8, note_after=2).items(tokenizer(), 1, 0)
    made = Told(tiny(VOCABULARY), tokenizer(), FULL)
    answer = items[0].data.answer
    for right, score, share in ((answer, 1.0, 1.0), (answer[:2], 0.0, 2 / 3), ((), 0.0, 0.0)):
        made.right = right
        (told,) = Planted(n=8, note_after=2).run(made, items, [0], 0)
        assert told.score == score
        assert close(told.metrics["tokens_right"], share)
        assert told.metrics["logprob"] == -6.0


def test_a_note_that_cannot_be_gone_is_refused() -> None:
    task = Planted(n=8, mode="r2", heads=1, note_after=8)
    items = task.items(tokenizer(), 1, 0)
    with pytest.raises(ValueError, match="too few for it to be gone: use a smaller note_after"):
        task.run(abacus(replace(RANDOM, buffer=16)), items, [0], 0)
    task.run(abacus(FULL), items, [0], 0)
    with pytest.raises(ValueError, match="heads=5: the model has 4 KV heads"):
        Planted(n=8, heads=5).run(abacus(), items, [0], 0)


def test_locate_finds_values_also_where_they_equal_others() -> None:
    """A value said of another variable is not the fact."""
    spec = Spec(16, "r1", note_after=4, questions=(3,))
    problem = make_problem(spec, 0, 0)
    asked = locate(problem, 3)
    line = problem.lines[2]
    words = [WORDS[t] for t in asked.trace]
    assert all(asked.trace[i] == IDS[str(line.value)] and words[i - 1] == line.name for i in asked.said)
    assert len(asked.said) >= 1 + 14  # its own step and the recaps after steps 3 to 16
