"""Results on disk: written whole or not at all, with what is needed to repeat them."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def write_json(path: str | Path, data: Any) -> None:
    """Write ``data`` as JSON. See :func:`write_text`."""
    write_text(path, json.dumps(data, indent=2) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a file in UTF-8. See :func:`write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file; a reader sees the old one or the new one, never half of it.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp makes files that only their owner reads
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def check_writable(path: str | Path | None) -> None:
    """Find out before long work that its result cannot be written.

    Raises:
        ValueError: the file cannot be made.
    """
    if path is None:
        return
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error}") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"cannot write {path}: it is a folder, or its folder is read-only")


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    found = {"python": platform.python_version()}
    for package in ("kvkeep", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a copy of the repository that was never installed
            from importlib import import_module

            found[package] = import_module(package).__version__
    return found
