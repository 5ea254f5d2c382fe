"""Where and with what a comparison ran."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..report.files import versions
from .models import Model

#: Packages whose versions can change a result.
PACKAGES = ("numpy", "scipy", "tokenizers", "datasets", "math-verify")


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_each(workers: int) -> int:
    """Threads of torch in each of ``workers`` processes; 0 workers: this process."""
    return max(1, cores() // max(workers, 1))


def all_versions() -> dict[str, str]:
    """Versions of everything a result depends on; a package that is not installed is left out."""
    found = versions()
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe(models: Sequence[Model], threads: int, config_sha256: str, files: Sequence[str] = ()) -> dict[str, Any]:
    """What ``environment.json`` says of one session; ``files`` are those that policies read.

    ``fixed`` must be the same whenever a run is resumed: floating-point results depend on it.
    """
    return {
        "fixed": {
            "versions": all_versions(),
            "code": code_sha256(),
            "machine": platform.machine(),
            "processor": _processor(),
            "threads": threads,
            "models": {model.name: model.identity for model in models},
            **({"files": {file: file_sha256(Path(file)) for file in sorted(set(files))}} if files else {}),
        },
        "config_sha256": config_sha256,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "platform": platform.platform(),
        "cores": cores(),
        "git": {"here": _git(Path.cwd()), "kvkeep": _git(Path(__file__).parent)},
    }


def file_sha256(file: Path) -> str:
    """Hash of a file's content."""
    with file.expanduser().open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@cache
def code_sha256() -> str:
    """Hash of kvkeep's own source: a version number says nothing of a working tree."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit and dirty state of the repository that holds ``folder``; None outside one or without git."""
    try:
        commit = _run(folder, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_run(folder, "status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _run(folder: Path, *words: str) -> str:
    made = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=30)
    return made.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
