"""The notation ``NAME:key=value,key=value`` for arms and tasks."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any


def parse(text: str, what: str) -> tuple[str, dict[str, Any]]:
    """Read ``NAME`` or ``NAME:key=value,...``; a value is a JSON scalar if it reads as one, else text.

    Args:
        text: what the user typed.
        what: "arm" or "task", for messages.

    Raises:
        ValueError: no name, a part without ``=``, an empty or repeated key.
    """
    name, colon, rest = text.strip().partition(":")
    name = name.strip()
    if not name:
        raise ValueError(f"a {what} is NAME or NAME:key=value,..., got {text!r}")
    found: dict[str, Any] = {}
    for part in rest.split(",") if colon else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not key or not value:
            raise ValueError(f"{what} {text!r}: {part.strip()!r} is not key=value (several are joined by commas)")
        if key in found:
            raise ValueError(f"{what} {text!r}: {key} is given twice")
        found[key] = _value(value)
    return name, found


def spell(name: str, options: Mapping[str, Any]) -> str:
    """The text that :func:`parse` reads as these."""
    if not options:
        return name
    return f"{name}:{','.join(f'{key}={_text(value)}' for key, value in options.items())}"


def canonical(name: str, task: Any, *always: str) -> str:
    """The shortest text that makes a task again.

    Args:
        name: of the task.
        task: a dataclass whose fields are its options.
        always: options that are written even where they have their default.
    """
    given = {
        f.name: getattr(task, f.name) for f in fields(task) if f.name in always or getattr(task, f.name) != f.default
    }
    return spell(name, given)


def suggest(word: str, known: Iterable[str]) -> str:
    """``did you mean X? known are X, Y`` for an unknown word."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=2, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{hint}known are {', '.join(names) or 'none'}"


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return text if isinstance(value, list | dict) else value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
