"""Tasks on real text: streams, and a passcode in long prose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models
from torch import Tensor

from forced import FULL, RANDOM, bytes_tokenizer, close, problems_file, prose
from kvkeep import Settings
from kvkeep.engine import Chunk
from kvkeep.evals.task import Item
from kvkeep.evals.tasks.passcode import Passcode, says
from kvkeep.evals.tasks.stream import Stream, side_by_side
from kvkeep.evals.tasks.text import read_passages
from kvkeep.hf.cache import EvictCache
from kvkeep.hf.engine import HFEngine


@pytest.fixture
def file(tmp_path: Path) -> str:
    return problems_file(tmp_path)


def test_streams_are_solutions_without_marks(file: str) -> None:
    task = Stream(tokens=150, prompt=20, path=file)
    items = task.items(bytes_tokenizer(), 3, 1)
    assert items == task.items(bytes_tokenizer(), 3, 1) != task.items(bytes_tokenizer(), 3, 2)
    texts = [bytes_tokenizer().decode([*item.prompt, *item.data]) for item in items]
    solutions = [solution for _, solution in read_passages(file)]
    for item, text in zip(items, texts, strict=True):
        assert len(item.prompt) == 20
        assert item.length == len(item.prompt) + len(item.data) == 150
        assert "<<" not in text
        assert text.split("\n\n")[0] in solutions
    assert len({text.split("\n\n")[0] for text in texts}) == 3
    with pytest.raises(ValueError, match=r"the file holds \d streams of 150 tokens, 9 were asked"):
        task.items(bytes_tokenizer(), 9, 1)


def distributions(engine: HFEngine, item: Item) -> Tensor:
    return torch.cat([c.logprobs[0] for c in engine.logits([item.prompt], [item.data])])


@pytest.mark.parametrize("skip", [0, 70])
def test_kl_is_that_of_the_whole_distributions(file: str, skip: int) -> None:
    settings = Settings("random", budget=40, buffer=8)
    task = Stream(tokens=150, prompt=20, skip=skip, path=file)
    items = task.items(bytes_tokenizer(), 3, 1)
    for item, told in zip(items, task.run(prose(settings), items, [0, 0, 0], 0), strict=True):
        ours, full = distributions(prose(settings), item), distributions(prose(FULL), item)
        first = (skip or 48) - 20 + 1
        kl = torch.nn.functional.kl_div(ours, full, log_target=True, reduction="none").sum(-1)
        assert torch.allclose(kl[: 48 - 20 + 1], torch.zeros(29), atol=1e-5)  # nothing was evicted before
        assert kl[48 - 20 + 1] > 1e-4  # and this is the first that sees a round
        said = torch.tensor(item.data).unsqueeze(-1)
        nll, nll_full = (-x.gather(-1, said)[first:].mean() for x in (ours, full))
        assert close(told.score, float(kl[first:].mean()))
        assert told.score > 0.004
        assert close(told.metrics["nll"], float(nll))
        assert close(told.metrics["nll_full"], float(nll_full))
        assert close(told.metrics["nll_rise"], float(nll) - told.metrics["nll_full"], 1e-3)
        assert close(told.metrics["top1"], float((ours.argmax(-1) == full.argmax(-1))[first:].float().mean()))
        assert told.stats["rounds"] > 5
        assert told.tokens == 130


def test_the_full_cache_differs_from_itself_by_nothing(file: str) -> None:
    task = Stream(tokens=150, prompt=20, skip=70, path=file)
    (told,) = task.run(prose(FULL), task.items(bytes_tokenizer(), 1, 1), [0], 0)
    assert told.score == 0
    assert told.metrics["top1"] == 1
    assert told.metrics["nll"] == told.metrics["nll_full"]
    arm = task.run(prose(Settings("random", budget=40, buffer=8)), task.items(bytes_tokenizer(), 1, 1), [0], 0)[0]
    assert close(arm.metrics["nll_full"], told.metrics["nll"])  # over the same positions


def test_a_stream_without_a_round_is_an_error(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Stream(tokens=100, prompt=20, path=file)
    items = task.items(bytes_tokenizer(), 1, 1)
    with pytest.raises(ValueError, match="no round would run: 100 tokens fit into K \\+ r = 128"):
        task.run(prose(), items, [0], 0)
    with pytest.raises(ValueError, match="no round would run"):
        task.run(prose(Settings("random", budget=91, buffer=8)), items, [0], 0)
    told = task.run(prose(Settings("random", budget=90, buffer=8)), items, [0], 0)[0]
    assert told.stats["rounds"] == 1
    with pytest.raises(ValueError, match="skip=40 would count positions before K"):
        replace(task, skip=40).run(prose(Settings("random", budget=60, buffer=8)), items, [0], 0)
    monkeypatch.setattr(Stream, "_first", lambda self, settings: 0)
    with pytest.raises(ValueError, match="no round ran on stream t100-s1-0"):
        task.run(prose(), items, [0], 0)


class Listed:
    """Chunks of given sizes whose numbers are their positions."""

    def __init__(self, sizes: Sequence[int]) -> None:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.chunks = iter(
            Chunk(a, torch.arange(a, a + n, dtype=torch.float32).view(1, n, 1))
            for a, n in zip(starts, sizes, strict=True)
        )

    def __next__(self) -> Chunk:
        return next(self.chunks)


@pytest.mark.parametrize("sizes", [([1, 9], [1, 3, 3, 3]), ([10], [1] * 10), ([4, 6], [6, 4]), ([5, 5], [5, 5])])
def test_chunks_are_cut_side_by_side(sizes: tuple[list[int], list[int]]) -> None:
    seen: list[float] = []
    one, other = (Listed(s) for s in sizes)
    for start, a, b in side_by_side(one, other):  # type: ignore[arg-type]
        assert torch.equal(a, b)
        assert start == len(seen)
        seen += a.flatten().tolist()
    assert seen == list(range(10))


# ---- passcode ------------------------------------------------------------------------------------


def test_both_places_see_the_same_tokens(file: str) -> None:
    prompt, trace = (
        Passcode(tokens=400, where=w, path=file).items(bytes_tokenizer(), 6, 3) for w in ("prompt", "trace")
    )
    header = len("You are a bot.\nUSER ")
    for one, two in zip(prompt, trace, strict=True):
        assert len(one.prompt) == 400
        assert one.prompt == (*two.prompt, *two.data.forced)
        assert len(two.prompt) == header
        assert one.length == two.length == 432
        text = bytes_tokenizer().decode(one.prompt)
        said = f"The passcode is {' '.join(one.data.passcode)}. Remember it.\n\n"
        assert text.count("The passcode") == 1
        assert text.endswith("\n\nWhat is the passcode mentioned in the text above?\nBOT ")
        assert close(text.index(said) / 400, one.data.depth)
        before = text[header : text.index(said)]
        assert before == "" or before.endswith("\n\n")
        assert before.startswith("Ann has") or not before
    assert len({one.data.passcode for one in prompt}) == 6
    assert len({one.data.depth for one in prompt}) > 2
    assert prompt == Passcode(tokens=400, path=file).items(bytes_tokenizer(), 6, 3)


def test_problems_that_share_a_prompt_do_not_share_draws(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Passcode(tokens=300, where="trace", answer=6, path=file)
    items = task.items(bytes_tokenizer(), 3, 0)
    assert len({item.prompt for item in items}) == 1
    kept: list[list[Tensor]] = []
    close_cache = EvictCache.close

    def close_and_note(cache: EvictCache) -> None:
        kept.append([cache.kept_positions(row) for row in range(len(cache.rows))])
        close_cache(cache)

    monkeypatch.setattr(EvictCache, "close", close_and_note)
    for batch, samples in ((items, [0, 0, 0]), (items[1:2], [0]), (items[1:2], [1])):
        task.run(prose(), batch, samples, 0)
    together, alone, other = kept
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(together[1], together[2])
    assert torch.equal(together[1], alone[0])
    assert not torch.equal(alone[0], other[0])


@pytest.mark.parametrize("where", ["prompt", "trace"])
def test_answers_are_graded(file: str, where: str) -> None:
    task = Passcode(tokens=300, where=where, answer=6, path=file)
    items = task.items(bytes_tokenizer(), 2, 0)
    found = task.run(prose(replace(RANDOM, budget=320)), items, [0, 0], 0)
    for told in found:
        assert told.score == 0  # random weights
        assert told.tokens <= 6
        assert told.truncated == (told.tokens == 6)
        assert told.stats["rounds"] == 0
        assert told.stats["prompt"] == (300 if where == "prompt" else len("You are a bot.\nUSER "))
    if where == "trace":
        told = task.run(prose(), items, [0, 0], 0)[0]
        assert told.stats["rounds"] > 10
        assert told.stats["seen"] == 300 + told.tokens - 1


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("The passcode is 4 7 2 9 1.", True),
        ("47291", True),
        ("4-7-2-9-1", True),
        ("**4, 7, 2, 9, 1**", True),
        ("4 7 2 9", False),
        ("4 7 2 9 1 5", False),
        ("8 4 7 2 9 1", False),
        ("4 7 2 9 1. 3 times", True),
        ("347291", False),
        ("472915", False),
        ("4 7 2 then 9 1", False),
        ("", False),
    ],
)
def test_digits_are_found_in_order(text: str, right: bool) -> None:
    assert says(text, "47291") == right


def test_passcodes_that_do_not_fit(file: str) -> None:
    with pytest.raises(ValueError, match="leaves no room for prose: use at least"):
        Passcode(tokens=50, path=file).items(bytes_tokenizer(), 1, 0)
    with pytest.raises(ValueError, match=r"tokens of prose, \d+ are needed"):
        Passcode(tokens=5000, path=file).items(bytes_tokenizer(), 1, 0)
    with pytest.raises(ValueError, match="the prompt does not fit"):
        task = Passcode(tokens=300, path=file)
        task.run(prose(), task.items(bytes_tokenizer(), 1, 0), [0], 0)
    plain = Tokenizer(tokenizer_models.WordLevel(vocab={"a": 0}, unk_token="a"))
    hf: Any = transformers
    with pytest.raises(ValueError, match="no chat template"):
        Passcode(path=file).items(hf.PreTrainedTokenizerFast(tokenizer_object=plain), 1, 0)
