"""Numbers that cross processes: the scheduler and the workers count, the server's front end reads.

vLLM runs them in several processes and offers plug-ins no channel between them. Each writer has a small file of its
own, mapped into memory; counting is a store to memory. A reader sums over the files of its engine.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import stat
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

#: Names of the numbers, in the order of the file: what is counted up, and what is a state.
COUNTED = (
    "requests",
    "grown_budgets",
    "rounds",
    "evicted_entries",
    "round_seconds",
    "moved_entries",
)
STATES = ("blocks_in_use", "blocks_saved", "blocks_in_pool")
NAMES = COUNTED + STATES
#: Names that :class:`Counters` gives: family, instance, engine, role, process and number.
_NAME = re.compile(r"[0-9a-f]{12}\.[^.]*\.\d+\.[^.]+\.\d+-\d+\.bin")
_HEADER = 4096  # bytes of JSON before the numbers
_numbered = itertools.count()


@dataclass(frozen=True)
class Engine:
    """Tells engines apart; as one text (:meth:`to_text`) it travels with the cache's spec.

    Attributes:
        instance: vLLM's ``instance_id``, the same in the engine's processes.
        index: number of the data-parallel engine.
        model: the name under which the model is served.
    """

    instance: str
    index: int
    model: str

    def to_text(self) -> str:
        """One line that :meth:`from_text` reads."""
        return f"{self.instance}.{self.index}.{self.model}"

    @classmethod
    def from_text(cls, text: str) -> Engine:
        """The engine :meth:`to_text` gave."""
        instance, index, model = text.split(".", 2)
        return cls(instance, int(index), model)


def folder() -> Path:
    """Where this user's processes leave their numbers."""
    return Path(tempfile.gettempdir()) / f"kvkeep-{os.getuid()}"


def family() -> str:
    """The same for a process and those it started with multiprocessing, different for all others."""
    return hashlib.sha256(bytes(multiprocessing.current_process().authkey)).hexdigest()[:12]


class Counters:
    """One process's numbers of one engine; gone when it is, also when the process was killed.

    Args:
        engine: text of an :class:`Engine`.
        role: what counts, unique among the engine's processes.

    Raises:
        OSError: the folder for temporary files cannot be written, or the one in it is a link or belongs to someone
            else; says what to do.
    """

    def __init__(self, engine: str, role: str) -> None:
        self.engine = Engine.from_text(engine)
        _clean_up_at_exit()
        name = f"{family()}.{self.engine.instance}.{self.engine.index}.{role}.{os.getpid()}-{next(_numbered)}.bin"
        place = _made()
        sweep()
        self.path = place / name
        header = json.dumps({"engine": self.engine.index, "model": self.engine.model[:128]}).encode()
        with _writable(place):
            # It appears complete and locked, so that nobody takes it for the file of a dead process.
            self._file = open(f"{self.path}.new", "x+b")  # noqa: SIM115 (the lock lasts as long as the file is open)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._file.write(header.ljust(_HEADER) + bytes(8 * len(NAMES)))
            self._file.flush()
            self._values: NDArray[np.float64] = np.memmap(
                self._file, dtype=np.float64, mode="r+", offset=_HEADER, shape=(len(NAMES),)
            )
            os.rename(self._file.name, self.path)
        weakref.finalize(self, _unlink_own, self.path, os.getpid())

    def add(self, name: str, by: float) -> None:
        """Count up."""
        self._values[NAMES.index(name)] += by

    def set(self, name: str, value: float) -> None:
        """Note a state."""
        self._values[NAMES.index(name)] = value


def read(instance: str, index: int | None = None) -> dict[str, float]:
    """The numbers of an engine of this process or of those it started, summed over its processes.

    Args:
        instance: vLLM's ``instance_id``.
        index: number of the data-parallel engine; None sums over all of them.

    Returns:
        By name; empty if none of its processes has counted yet.
    """
    parts = [numbers for _, numbers in _files(f"{family()}.{instance}.{'*' if index is None else index}.*.bin")]
    return dict(zip(NAMES, map(float, np.sum(parts, axis=0)), strict=True)) if parts else {}


def read_all() -> dict[tuple[str, str], dict[str, float]]:
    """The numbers of all engines of this process and of those it started, by model name and engine number."""
    sums: dict[tuple[str, str], NDArray[np.float64]] = {}
    for header, numbers in _files(f"{family()}.*.bin"):
        key = (str(header["model"]), str(header["engine"]))
        sums[key] = sums.get(key, 0) + numbers
    return {key: dict(zip(NAMES, map(float, total), strict=True)) for key, total in sorted(sums.items())}


def sweep() -> None:
    """Remove what killed processes left: files with names of :class:`Counters` that nobody holds locked."""
    for path in _found("*.bin"):
        if not _NAME.fullmatch(path.name):
            continue
        with suppress(FileNotFoundError), path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            path.unlink(missing_ok=True)


def _files(pattern: str) -> Iterator[tuple[dict[str, object], NDArray[np.float64]]]:
    for path in _found(pattern):
        with suppress(FileNotFoundError):  # its process just ended
            data = path.read_bytes()
            yield json.loads(data[:_HEADER]), np.frombuffer(data, dtype=np.float64, offset=_HEADER)


def _found(pattern: str) -> list[Path]:
    """Our own files. Where :class:`Counters` refuses to write there are none, and readers need not fail."""
    try:
        place = folder()
        _check_own(place)
    except OSError:
        return []
    return sorted(place.glob(pattern))


def _made() -> Path:
    """The folder, which is ours alone."""
    try:
        place = folder()
    except FileNotFoundError as error:  # Python looked for one and found none
        raise OSError(
            f"kvkeep's numbers need a folder for temporary files ({error}): set TMPDIR to one that can be written"
        ) from error
    with _writable(place.parent), suppress(FileExistsError):
        place.mkdir(mode=0o700)
    _check_own(place)
    return place


def _check_own(place: Path) -> None:
    """Refuse a folder that someone else put there, or may lead to files of others."""
    found = place.lstat()
    if stat.S_ISLNK(found.st_mode) or not stat.S_ISDIR(found.st_mode):
        raise OSError(f"{place} is a link or no folder: remove it, or set TMPDIR to a folder of your own")
    if found.st_uid != os.getuid():
        raise PermissionError(f"{place} belongs to another user: remove it, or set TMPDIR to a folder of your own")


@contextmanager
def _writable(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(
            f"kvkeep's numbers cannot be written to {place} ({error.strerror}): set TMPDIR to a folder that "
            "can be written"
        ) from error


def _unlink_own(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a fork that inherited the object
        path.unlink(missing_ok=True)


@cache
def _clean_up_at_exit() -> None:
    """The first process of an engine is its last: it removes the files of those that it had to kill."""
    if multiprocessing.parent_process() is None:
        atexit.register(_unlink_family, family(), os.getpid())


def clean_up_at_exit() -> None:
    """Remove the files of this process and of those it started when it ends; for a server's first process."""
    _clean_up_at_exit()


def _unlink_family(name: str, pid: int) -> None:
    if os.getpid() == pid:
        for path in _found(f"{name}.*.bin*"):
            path.unlink(missing_ok=True)
