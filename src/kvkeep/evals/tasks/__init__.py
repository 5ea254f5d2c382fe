"""Tasks by their short names; packages add their own through the entry point group ``kvkeep.tasks``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, cast, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ..spelling import parse, spell, suggest

if TYPE_CHECKING:
    from ..task import Task

GROUP = "kvkeep.tasks"
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
#: Imported when they are used: a command's help must not wait for transformers.
BUILT_IN = {
    "abacus": "kvkeep.evals.tasks.abacus:Abacus",
    "questions": "kvkeep.evals.tasks.questions:Questions",
    "planted": "kvkeep.evals.tasks.planted:Planted",
    "passcode": "kvkeep.evals.tasks.passcode:Passcode",
    "stream": "kvkeep.evals.tasks.stream:Stream",
}


def make_task(text: str) -> Task:
    """The task that ``NAME:key=value,...`` names.

    Raises:
        ValueError: unknown name, option or value; near names are suggested.
    """
    name, options = parse(text, "task")
    maker = _find(name)
    allowed = inspect.signature(maker).parameters
    hints = get_type_hints(maker)
    for key, value in options.items():
        if key not in allowed:
            raise ValueError(f"task {text!r} has no option {key!r}: {suggest(key, allowed)}")
        _check_type(text, key, value, hints.get(key, Any))
    required = (p.name for p in allowed.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD)
    if missing := [key for key in required if key not in options]:
        raise ValueError(f"task {text!r} needs {missing[0]}=...")
    try:
        return cast("Task", maker(**options))
    except (TypeError, ValueError) as error:
        raise ValueError(f"task {text!r}: {error}") from error


def _check_type(text: str, key: str, value: Any, hint: Any) -> None:
    try:
        TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        kinds = [_WORDS.get(kind, str(kind)) for kind in get_args(hint) or (hint,) if kind is not type(None)]
        raise ValueError(f"task {text!r}: {key} must be {' or '.join(kinds)}, got {value!r}") from error


def with_options(text: str, more: dict[str, Any]) -> str:
    """A task's text with further options, for options that the command line has of its own.

    Raises:
        ValueError: the task does not take one, or has it already with another value.
    """
    name, options = parse(text, "task")
    allowed = inspect.signature(_find(name)).parameters
    for key, value in more.items():
        flag = f"--{key.replace('_', '-')}"
        if key not in allowed:
            raise ValueError(f"task {name} takes no {key}: leave {flag} out, or put {key}=... into the tasks that do")
        if options.setdefault(key, value) != value:
            raise ValueError(f"task {text!r} says {key}={options[key]} and {flag} says {value}: give one of them")
    return spell(name, options)


def _find(name: str) -> Callable[..., Any]:
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        return cast("Callable[..., Any]", getattr(importlib.import_module(module), attribute))
    others = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in others:
        raise ValueError(f"unknown task {name!r}: {suggest(name, [*BUILT_IN, *others])}")
    try:
        return cast("Callable[..., Any]", others[name].load())
    except Exception as error:  # somebody else's package: say whose, whatever went wrong
        raise ValueError(f"the task {name!r} ({others[name].value}) cannot be loaded: {error}") from error
