"""A comparison that is killed at random moments and resumed gives the results of one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from comparing import abacus_model, without_clock  # noqa: F401 - a fixture

WORDS = """
compare --task abacus:n=4,mode=r0 --policy full --policy random --policy streaming --compression 1.5,2 --buffer 8
--problems 8 --runs 2 --batch 2 --check 4 --primary
"""


def start(model: Path, out: Path) -> subprocess.Popen[str]:
    # A shell starts background jobs with interrupts ignored, which children inherit: whoever runs the tests.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{heed}; from kvkeep.cli import main; main()"
    words = [*WORDS.split(), "random vs streaming", "--model", str(model), "--out", str(out)]
    command = [sys.executable, "-c", code, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(process: subprocess.Popen[str]) -> None:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "report:" in out


def lines(out: Path) -> int:
    file = out / "samples.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
        except (OSError, IndexError):  # it has just ended
            continue
    return found


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "worker processes outlive a killed run"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_kill_and_resume(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    finish(start(abacus_model, whole))
    total, rng, stops = lines(whole), random.Random(seed := os.getpid()), []
    print(f"moments of the kills drawn with seed {seed}")
    for part in (0.1, 0.4, 0.7):
        process = start(abacus_model, torn)
        while lines(torn) < part * total:  # it has work left: the next batch is under way
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        time.sleep(rng.random() * 0.2)
        workers = children(process.pid)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        wait_until_gone(workers)
        stops.append(lines(torn))
    assert 0 < stops[0] < stops[2]
    finish(start(abacus_model, torn))
    for name in ("samples.jsonl", "checks.jsonl"):
        a, b = (
            [without_clock(json.loads(line)) for line in (out / name).read_text().splitlines()] for out in (whole, torn)
        )
        assert a == b
    a, b = (without_clock(json.loads((out / "cells.json").read_text())) for out in (whole, torn))
    assert a == b


@pytest.mark.slow
def test_an_interrupt_leaves_a_folder_that_can_be_resumed(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    process = start(abacus_model, tmp_path / "run")
    while lines(tmp_path / "run") == 0:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it as well
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on from there" in " ".join(err.split())
    assert "Traceback" not in err
    done = lines(tmp_path / "run")
    finish(start(abacus_model, tmp_path / "run"))
    assert lines(tmp_path / "run") > done > 0
