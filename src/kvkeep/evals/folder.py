"""A results folder: whose it is, what is done, and who is writing it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..report.files import write_json
from . import environment
from .config import first_difference
from .run import Prepared


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process writes a results folder at a time.

    Raises:
        ValueError: another one does, or the folder cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with FileLock(path / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise ValueError(f"another process writes {path}: wait for it, or pass another --out") from error
    except FileExistsError as error:
        raise ValueError(f"cannot write {path}: it is a file; pass another --out") from error


def claim(path: Path, prepared: Prepared) -> None:
    """Write the configuration into a folder without samples, or see that an old one holds the same comparison.

    Raises:
        ValueError: the folder holds another comparison.
    """
    config = _config(prepared)
    begun = path / "config.json"
    samples = path / "samples.jsonl"
    if begun.exists() and samples.exists() and samples.stat().st_size:
        _same_config(path, config)
        return
    if strangers := [p.name for p in path.iterdir() if p.name.endswith(".jsonl") and p.stat().st_size]:
        raise ValueError(f"{path} has {', '.join(strangers)} but no config.json: pass another --out")
    write_json(begun, config)
    write_json(path / "environment.json", {"sessions": []})


def join(path: Path, prepared: Prepared, threads: int, allow_mixed: bool, todo: bool) -> bool:
    """Note this session, if it has something to run, and see that it is like the ones before.

    A finished folder may be summed up by any version: nothing new is computed.

    Returns:
        Whether the folder holds results of different versions or machines (only with ``allow_mixed``).

    Raises:
        ValueError: it was begun with other versions, other code or on another machine.
    """
    file = path / "environment.json"
    sessions = _read(file)["sessions"] if file.exists() else []
    now = environment.describe(prepared.models, threads, _sha256(_config(prepared)), _files(prepared))
    for session in sessions:
        if found := first_difference(session["fixed"]["models"], now["fixed"]["models"]):
            raise ValueError(f"{path} holds results of other weights ({found[0]} changed): pass another --out")
        if found := first_difference(session["fixed"].get("files", {}), now["fixed"].get("files", {})):
            raise ValueError(f"{path} was begun with another content of {found[0]}: pass another --out")
        if todo and not allow_mixed:
            _refuse_others(path, session, now)
    if todo:
        sessions = [*sessions, now]
        write_json(file, {"sessions": sessions})
    return any(session["fixed"] != sessions[0]["fixed"] for session in sessions)


def _config(prepared: Prepared) -> dict[str, Any]:
    return dict(json.loads(json.dumps(prepared.to_dict())))


def _same_config(path: Path, config: dict[str, Any]) -> None:
    old = _read(path / "config.json")
    found = first_difference(old, config)
    if found is None:
        return
    field, before, after = found
    if field.startswith("primary"):
        raise ValueError(
            f"{path} was begun with other primary comparisons ({json.dumps(old.get('primary'))}, now "
            f"{json.dumps(config['primary'])}): they are declared before a run, not after it. "
            "Pass the same --primary, or another --out."
        )
    raise ValueError(
        f"{path} holds another comparison: {field} is {_short(before)} there and {_short(after)} now. "
        "Pass the same values to go on with it, or another --out."
    )


def _refuse_others(path: Path, session: dict[str, Any], now: dict[str, Any]) -> None:
    if found := first_difference(session["fixed"], now["fixed"]):
        field, before, after = found
        hint = " (--workers sets the threads of each)" if field == "threads" else ""
        raise ValueError(
            f"{path} was begun with {field} {_short(before)}, this is {_short(after)}{hint}; results may differ. "
            "Go on as it was begun, pass another --out, or --allow-mixed, which marks the results."
        )


def _sha256(config: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def _read(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (json.JSONDecodeError, TypeError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error}): pass another --out") from error


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


def _files(prepared: Any) -> list[str]:
    """Files that decide what an arm keeps."""
    return [file for cell in prepared.cells for file in cell.settings.make_policy().files()]
