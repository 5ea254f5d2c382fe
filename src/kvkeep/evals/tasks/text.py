"""Real text for tasks: passages from a JSONL file of problems and solutions, as text and as tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

#: Used where no ``path`` is given: 1,319 problems with solutions (MIT), which kvkeep does not ship.
DEFAULT = Path("../shared/data/gsm8k_test.jsonl")
_FIELDS = (("question", "answer"), ("problem", "solution"))  # GSM8K, MATH
_MARK = "\x00text\x00"


@lru_cache(maxsize=4)
def read_passages(path: str) -> tuple[tuple[str, str], ...]:
    """Problems and solutions of a JSONL file, without GSM8K's calculator marks.

    The marks (``<<48/2=24>>``) are annotations for a tool, not text, and say each result just before the text does.

    Args:
        path: the file; "" for :data:`DEFAULT`. Every line has the fields question and answer, or problem and solution.

    Raises:
        ValueError: the file is missing, or a line is not what it should be.
    """
    file = Path(path) if path else DEFAULT
    if not file.is_file():
        advice = "" if path else " (looked for when no path is given)"
        raise ValueError(
            f"there is no file {file}{advice}: pass path=FILE, JSON lines with the fields question and answer, e.g. "
            "the test set of openai/grade-school-math"
        )
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            problem, solution = next((row[a], row[b]) for a, b in _FIELDS if a in row and b in row)
            found.append((str(problem).strip(), re.sub(r"<<[^>]*>>", "", str(solution)).strip()))
        except (json.JSONDecodeError, TypeError, StopIteration) as error:
            raise ValueError(
                f"{file}, line {number}: not a JSON object with the fields question and answer, or problem and solution"
            ) from error
    if not found:
        raise ValueError(f"{file} is empty")
    return tuple(found)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of plain text, nothing added.

    Raises:
        ValueError: the tokenizer knows only other words.
    """
    try:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception as error:  # what the tokenizers library raises has no type of its own
        raise ValueError(
            f"this model's tokenizer cannot encode English text ({error}): use a language model such as smollm2"
        ) from error
    return list(ids)


def chat_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the chat template puts before and behind a user's message, the assistant's turn opened, as token ids.

    Raises:
        ValueError: there is no template, or it does not pass the message on as it is.
    """
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template, which this task needs: use an instruction-tuned model")
    template: Any = tokenizer.apply_chat_template
    shown = template([{"role": "user", "content": _MARK}], add_generation_prompt=True, tokenize=False)
    before, mark, behind = shown.partition(_MARK)
    if not mark or not before:
        raise ValueError("the chat template does not put the user's message behind a beginning of its own")
    return encode(tokenizer, before), encode(tokenizer, behind)


def chat_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """Token ids of a user's message in the chat template, the assistant's turn opened."""
    template: Any = tokenizer.apply_chat_template
    return tuple(template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False))


def check_counts(**counts: int) -> None:
    """Refuse options that are not whole numbers of at least 1."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


def join(parts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """One sequence of token ids."""
    return tuple(token for part in parts for token in part)
