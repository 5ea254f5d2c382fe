"""Questions with a short answer, from a file or the hub: GSM8K, MATH-500 and the like."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from ...engine import Engine, Sampling
from ..spelling import canonical, suggest
from ..task import Item, Outcome
from .text import chat_prompt

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."
QUESTIONS = ("question", "problem", "prompt")
ANSWERS = ("answer", "solution", "final_answer")
GRADERS = ("math-verify", "boxed", "number")


@dataclass(frozen=True)
class Questions:
    r"""Questions asked through the model's chat template; the score is 1 for the right answer.

    Args:
        path: a JSONL file, or a dataset of the hub (needs ``datasets``), with a question and an answer in each row
            (``question`` or ``problem``; ``answer``; GSM8K's ``#### 18`` is understood).
        split: of a hub dataset.
        subset: configuration of a hub dataset.
        grader: ``math-verify`` (needs the package of this name), ``boxed`` (the last ``\boxed{}`` must be the answer
            as text) or ``number`` (the last number of the trace). None stands in for another.
        temperature, top_p: how tokens are chosen; 0 is greedy.
        max_new_tokens: tokens of a trace at most.
        length: expected tokens of a trace, which a compression is counted from; None: ``max_new_tokens``.

    Raises:
        ValueError: a value is out of range, or what it needs is not installed.
    """

    path: str
    split: str = "test"
    subset: str | None = None
    grader: str = "math-verify"
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 4096
    length: int | None = None

    metric: ClassVar[str] = "accuracy"
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    higher_is_better: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.grader not in GRADERS:
            raise ValueError(f"unknown grader {self.grader!r}: {suggest(self.grader, GRADERS)}")
        if self.grader == "math-verify" and importlib.util.find_spec("math_verify") is None:
            raise ValueError("grader math-verify needs `pip install math-verify`; or say grader=boxed or grader=number")
        if self.length is not None and not 1 <= self.length <= self.max_new_tokens:
            raise ValueError(f"length must lie in 1..{self.max_new_tokens} (max_new_tokens), got {self.length}")
        self.sampling(0)  # refuses what is out of range

    @property
    def name(self) -> str:
        """Canonical text."""
        return canonical("questions", self, "path")

    def sampling(self, seed: int) -> Sampling:
        """How tokens are chosen."""
        return Sampling(self.max_new_tokens, float(self.temperature), float(self.top_p), seed=seed)

    def items(self, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> list[Item]:
        """``count`` questions drawn by ``seed``; named by their row.

        Raises:
            ValueError: there are fewer, a row has no question or answer, or the tokenizer has no chat template.
        """
        if not tokenizer.chat_template:
            raise ValueError(f"{self.path}: the tokenizer has no chat template, so these questions cannot be asked")
        rows = _rows(self.path, self.split, self.subset)
        if len(rows) < count:
            raise ValueError(f"{self.path} has {len(rows)} questions, {count} are wanted: lower --problems")
        order = list(range(len(rows)))
        random.Random(f"questions-{seed}").shuffle(order)  # whole, so that more questions begin with the same ones
        return [self._item(tokenizer, number, rows[number]) for number in order[:count]]

    def most_tokens(self, item: Item) -> int:
        """Tokens of the trace at most."""
        return self.max_new_tokens

    def run(self, engine: Engine, items: Sequence[Item], samples: Sequence[int], seed: int) -> list[Outcome]:
        """Generate and grade."""
        made = engine.generate([item.prompt for item in items], samples, self.sampling(seed))
        return [self._outcome(item, sample) for item, sample in zip(items, made, strict=True)]

    def _item(self, tokenizer: PreTrainedTokenizerBase, number: int, row: dict[str, Any]) -> Item:
        question, answer = (_field(self.path, number, row, names) for names in (QUESTIONS, ANSWERS))
        prompt = chat_prompt(tokenizer, f"{question}\n{INSTRUCTION}")
        data = {"answer": final_answer(answer), "end": tokenizer.eos_token_id}
        return Item(f"{number}", prompt, len(prompt) + (self.length or self.max_new_tokens), data)

    def _outcome(self, item: Item, sample: Any) -> Outcome:
        answered, right = judge(self.grader, sample.text, item.data["answer"])
        cut = len(sample.tokens) >= self.max_new_tokens and sample.tokens[-1] != item.data["end"]
        return Outcome(float(right), answered, cut, len(sample.tokens), sample.text, sample.stats)


def judge(grader: str, trace: str, answer: str) -> tuple[bool, bool]:
    """Whether a trace gave an answer that could be read, and whether it is right."""
    if grader == "math-verify":
        from math_verify import parse, verify

        found = parse(trace)
        return bool(found), bool(found) and bool(verify(parse(f"\\boxed{{{answer}}}"), found))
    given = last_boxed(trace) if grader == "boxed" else last_number(trace)
    if given is None:
        return False, False
    wanted = last_number(answer) if grader == "number" else answer
    return True, _plain(given) == _plain(wanted or answer)


def final_answer(text: str) -> str:
    r"""The answer of a row: what follows ``####``, else the last ``\boxed{}``, else all of it."""
    if "####" in text:
        return text.rpartition("####")[2].strip()
    return last_boxed(text) or text.strip()


def last_boxed(text: str) -> str | None:
    r"""What the last ``\boxed{...}`` holds, with balanced braces; None if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for place in range(start + len("\\boxed"), len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return text[start + len("\\boxed{") : place].strip()
    return None


def last_number(text: str) -> str | None:
    """The last number of a text, without thousands separators."""
    found = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return found[-1].replace(",", "") if found else None


def _plain(text: str) -> str:
    text = re.sub(r"\s|\$|,(?=\d{3}\b)", "", text).rstrip(".")
    try:
        return f"{float(text):.10g}"
    except ValueError:
        return text


def _field(path: str, number: int, row: dict[str, Any], names: Sequence[str]) -> str:
    for name in names:
        if row.get(name) not in (None, ""):
            return str(row[name])
    raise ValueError(f"{path}, row {number} has none of {', '.join(names)}: it has {', '.join(row)}")


@cache
def _rows(path: str, split: str, subset: str | None) -> list[dict[str, Any]]:
    file = Path(path).expanduser()
    if file.is_file():
        return [_parse(file, number, line) for number, line in enumerate(file.read_text().splitlines()) if line.strip()]
    if file.suffix == ".jsonl" or path[0] in "./~":
        raise ValueError(f"there is no file {file}: check the path, or pass the name of a hub dataset")
    if importlib.util.find_spec("datasets") is None:
        raise ValueError(f"{path} is no file; to read it from the hub, `pip install datasets`")
    from datasets import load_dataset

    return [dict(row) for row in load_dataset(path, subset, split=split)]


def _parse(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}, line {number + 1} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{file}, line {number + 1} is not a JSON object")
    return row
