"""Numbers across processes: who sees whose, and what is left behind. Needs no vLLM."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvkeep.vllm.counters import Counters, Engine, family, folder, read, read_all, sweep


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def files() -> list[str]:
    return [path.name for path in folder().glob("*")]


def engine(instance: str = "1", index: int = 0) -> str:
    return Engine(instance, index, "org/a model.gguf").to_text()


def _child(send: multiprocessing.connection.Connection) -> None:
    counters = Counters(engine(), "worker1")
    counters.add("rounds", 5)
    send.send("counted")
    signal.pause()


def test_engine_names_survive_the_trip() -> None:
    assert Engine.from_text(engine("17", 3)) == Engine("17", 3, "org/a model.gguf")


def test_sums_over_processes_and_engines() -> None:
    assert read("1") == {}
    assert read_all() == {}
    one, two = Counters(engine(), "scheduler"), Counters(engine(index=1), "scheduler")
    other = Counters(engine("2"), "scheduler")
    one.add("rounds", 2)
    one.add("rounds", 1)
    one.set("blocks_in_use", 9)
    one.set("blocks_in_use", 4)
    two.add("rounds", 10)
    other.add("rounds", 100)
    assert (read("1")["rounds"], read("1", 0)["rounds"], read("1", 1)["rounds"]) == (13, 3, 10)
    assert read("1")["blocks_in_use"] == 4
    assert {key: numbers["rounds"] for key, numbers in read_all().items()} == {
        ("org/a model.gguf", "0"): 103,
        ("org/a model.gguf", "1"): 10,
    }
    del one, two, other
    gc.collect()
    assert files() == []


def test_a_killed_child() -> None:
    """Its numbers count while it lives; its file goes with the next process that counts."""
    get, send = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_child, args=(send,))
    child.start()
    assert get.recv() == "counted"
    mine = Counters(engine(), "scheduler")
    mine.add("rounds", 1)
    assert read("1")["rounds"] == 6
    sweep()
    assert len(files()) == 2
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert len(files()) == 2
    sweep()
    assert len(files()) == 1
    assert read("1")["rounds"] == 1


PROGRAM = """
import multiprocessing, os, signal
from kvkeep.vllm.counters import Counters

def child():
    counters = Counters("1.0.m", "worker")
    counters.add("rounds", 1)
    os.kill(os.getpid(), signal.SIGKILL)

counters = Counters("1.0.m", "scheduler")
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
assert len(list(counters.path.parent.glob("*.bin"))) == 2
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "1 / 0"])
def test_a_program_that_ends_leaves_nothing(end: str) -> None:
    """Nor do the children that it, or someone, killed; nor do forks take its files with them."""
    subprocess.run([sys.executable, "-c", PROGRAM.format(end=end)], check=False, stderr=subprocess.DEVNULL)
    assert folder().is_dir()
    assert files() == []


def test_other_programs_are_not_ours() -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(end="print('ready', flush=True); input()")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    assert files()
    assert read("1") == {}
    assert read_all() == {}
    program.communicate("\n")
    assert files() == []


def test_a_folder_of_someone_else(monkeypatch: pytest.MonkeyPatch) -> None:
    folder().mkdir()
    place = folder()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr("kvkeep.vllm.counters.folder", lambda: place)
    with pytest.raises(PermissionError, match="belongs to another user"):
        Counters(engine(), "scheduler")


# ---- files that are not ours -----------------------------------------------------------------------------------------


def test_only_files_with_our_names_are_swept() -> None:
    counters = Counters(engine(), "scheduler")
    dead = counters.path.with_name(f"{'0' * 12}.1.0.worker0-0.99-0.bin")
    others = [counters.path.with_name(name) for name in ("weights.bin", "0.1.0.worker.99-0.bin", f"{dead.name}.bin")]
    for path in (dead, *others):
        path.write_bytes(b"precious")
    sweep()
    assert not dead.exists()
    assert all(path.read_bytes() == b"precious" for path in others)
    assert counters.path.exists()


@pytest.mark.parametrize("kind", ["link", "dangling", "file"])
def test_a_link_in_place_of_the_folder(kind: str, tmp_path: Path) -> None:
    """Files behind it stay; a server that does not evict still shows its own numbers."""
    elsewhere = tmp_path / "elsewhere"
    precious = elsewhere / f"{family()}.1.0.worker.99-0.bin"
    if kind == "link":
        elsewhere.mkdir()
        precious.write_bytes(b"precious")
    if kind == "file":
        folder().touch()
    else:
        folder().symlink_to(elsewhere)
    with pytest.raises(OSError, match=r"is a link or no folder: remove it, or set TMPDIR to a folder of your own"):
        Counters(engine(), "scheduler")
    sweep()
    assert (read("1"), read_all()) == ({}, {})
    assert kind != "link" or precious.read_bytes() == b"precious"


def test_a_temporary_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    monkeypatch.setattr(tempfile, "tempdir", str(gone))  # removed after Python had chosen it; root may write anywhere
    says = rf"cannot be written to {gone} \(No such file or directory\): set TMPDIR to a folder that can be written"
    with pytest.raises(OSError, match=says):
        Counters(engine(), "scheduler")
    assert (read("1"), read_all()) == ({}, {})


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "rename", full)
    says = rf"cannot be written to {folder()} \(No space left on device\): set TMPDIR"
    with pytest.raises(OSError, match=says):
        Counters(engine(), "scheduler")


def test_no_temporary_folder_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(OSError, match=r"No usable temporary directory .*: set TMPDIR to one that can be written"):
        Counters(engine(), "scheduler")
    assert (read("1"), read_all()) == ({}, {})
