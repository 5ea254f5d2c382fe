"""``kvkeep bench serve``: which runs are made, what is kept of them, and what they are said to show."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from typer.testing import CliRunner

from kvkeep.bench import serve
from kvkeep.bench.cli import app
from kvkeep.bench.serve_tables import floor_lines, floors, ratio, summary, tables

OPTIONS = serve.Options(prompt=16, budget=96, buffer=32, block_size=32, concurrency=3, fit=2, requests=6)
SECONDS = {"stock": 4.0, "random": 2.0, "gather": 3.0}


class Stopped(Exception):
    """The machine went down."""


class Desk:
    """Starts engines that only pretend, and writes down what they are asked for."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.asked: list[tuple[str, int, int]] = []  # arm, tokens, requests
        self.prompts: list[list[list[int]]] = []
        self.open = 0
        self._stop_after = stop_after

    def start(self, options: serve.Options, cell: serve.Cell, arm: str) -> Any:
        self.open += 1
        return Pretender(self, arm, options.pool(*cell))

    def note(self, arm: str, prompts: list[list[int]], length: int) -> None:
        if self._stop_after is not None and len(self.asked) >= self._stop_after:
            raise Stopped
        self.asked.append((arm, length, len(prompts)))
        self.prompts.append(prompts)


class Pretender:
    def __init__(self, desk: Desk, arm: str, pool: int) -> None:
        self._desk, self._arm, self._pool = desk, arm, pool

    def ready(self) -> dict[str, Any]:
        return {"vllm": "0", "blocks": self._pool, "concurrency": 2.0, "vocabulary": 100}

    def run(self, prompts: list[list[int]], length: int) -> dict[str, float]:
        self._desk.note(self._arm, prompts, length)
        counts = {"preemptions": 1, "running_mean": 2, "running_peak": 3, "blocks_peak": 4, "evicted_entries": 64}
        times = {"wall_s": SECONDS[self._arm], "cpu_s": 2 * SECONDS[self._arm], "round_seconds": 0.02}
        return {**times, **counts, "tokens": length * len(prompts), "steps": length, "rounds": 2, "moved_entries": 1}

    def close(self) -> None:
        self._desk.open -= 1


def measure(desk: Desk, cells: list[serve.Cell], **more: Any) -> dict[str, Any]:
    return serve.run(OPTIONS, cells, more.pop("arms", ("stock", "random")), show=False, start=desk.start, **more)


def test_arms_take_turns_with_the_same_requests_after_a_warm_up() -> None:
    desk = Desk()
    measure(desk, [("full", 200)], arms=("stock", "random", "gather"), repeats=2)
    warm, timed = desk.asked[:3], desk.asked[3:]
    assert {arm for arm, _, _ in warm} == set(SECONDS)
    assert all(length == OPTIONS.budget + OPTIONS.buffer + 16 for _, length, _ in warm)  # so that rounds have run
    assert [arm for arm, _, _ in timed] == ["stock", "random", "gather", "random", "gather", "stock"]
    assert all(asked[1:] == (200, OPTIONS.requests) for asked in timed)
    first, second = desk.prompts[3:6], desk.prompts[6:]
    assert first[0] == first[1] == first[2]
    assert second[0] == second[1] == second[2]
    seen = [tuple(p) for p in (*desk.prompts[0], *first[0], *second[0])]
    assert len(set(seen)) == len(seen)  # nothing that the prefix cache could know
    assert all(len(p) == OPTIONS.prompt and max(p) < 100 for p in seen)
    assert desk.open == 0


def test_pools_hold_what_their_regime_says() -> None:
    assert OPTIONS.blocks(80) == 3
    assert OPTIONS.pool("fixed", 80) == 3 * OPTIONS.concurrency
    assert OPTIONS.pool("full", 80) == 3 * OPTIONS.fit
    with pytest.raises(ValueError, match="not full"):
        serve.run(replace(OPTIONS, requests=2), [("full", 80)], start=Desk().start, show=False)


def test_ratios_are_of_speeds_by_the_clock_and_by_processor_time() -> None:
    result = measure(Desk(), [("fixed", 200)], arms=("stock", "random", "gather"), repeats=3)
    rows = {row["arm"]: row for row in result["rows"]}
    assert rows["random"]["over_stock"] == pytest.approx([2, 2, 2])
    assert rows["random"]["cpu_over_stock"] == pytest.approx([2, 2, 2])
    assert rows["gather"]["over_random"] == pytest.approx([2 / 3] * 3)
    assert rows["stock"]["tokens_per_s"] == OPTIONS.concurrency * 200 / SECONDS["stock"]
    assert rows["random"]["round_share"] == pytest.approx(0.01)


def test_intervals_of_ratios_are_students_on_logarithms() -> None:
    arm, base = [2.1, 1.8, 2.3, 2.0], [1.0, 1.0, 1.1, 0.9]
    logs = [math.log(a / b) for a, b in zip(arm, base, strict=True)]
    expected = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    value, low, high = ratio(arm, base)
    assert value == pytest.approx(math.exp(sum(logs) / 4))
    assert (math.log(low), math.log(high)) == pytest.approx((expected.low, expected.high))
    assert ratio([3.0], [2.0]) == (pytest.approx(1.5), 0.0, math.inf)  # one turn says nothing about noise


def test_a_stopped_measurement_continues_where_it_was(tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    stopped = Desk(stop_after=7)  # in the first cell: 2 to warm up, 2 turns of 2, and half of the third turn
    cells = [("fixed", 100), ("full", 100)]
    with pytest.raises(Stopped):
        measure(stopped, cells, repeats=3, json_file=file)
    assert stopped.open == 0
    assert len(json.loads(file.read_text())["runs"]) == 5
    desk = Desk()
    result = measure(desk, cells, repeats=3, json_file=file)
    warm, turn = 2, 2
    assert len(desk.asked) == (warm + turn) + (warm + 3 * turn)  # the broken turn as a whole, and the second cell
    assert len(result["runs"]) == 12
    assert result == json.loads(file.read_text())
    again = Desk()
    assert measure(again, cells, repeats=3, json_file=file)["rows"] == result["rows"]
    assert again.asked == []


def test_results_of_other_settings_are_neither_continued_nor_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "serve.json"
    measure(Desk(), [("fixed", 100)], repeats=1, json_file=file)
    before = file.read_text()
    with pytest.raises(ValueError, match="settings"):
        serve.run(replace(OPTIONS, budget=128), [("fixed", 100)], json_file=file, start=Desk().start, show=False)
    assert file.read_text() == before


def _row(arm: str, regime: str, length: int, seconds: float, rounds: float, share: float) -> dict[str, Any]:
    counts = {"preemptions": 0, "running_mean": 1, "running_peak": 1, "blocks_peak": 1, "evicted_entries": 0}
    about = {"regime": regime, "length": length, "arm": arm, "turn": 0, "pool": 9, "concurrency": None}
    times = {"wall_s": seconds, "cpu_s": seconds, "round_seconds": share * seconds}
    return {**about, **counts, **times, "rounds": rounds, "steps": 1, "tokens": 100}


def test_floors_are_about_the_ends_and_fail_when_missed() -> None:
    runs = [
        *(_row("stock", *where, 1.0, 0, 0) for where in (("fixed", 64), ("full", 64), ("full", 512), ("full", 4096))),
        _row("random", "fixed", 64, 1.02, 0, 0),
        _row("random", "full", 64, 1.1, 0, 0),
        _row("random", "full", 512, 0.9, 5, 0.001),  # neither shortest nor longest: promises nothing
        _row("random", "full", 4096, 0.5, 9, 0.03),
    ]
    found = {f["what"]: f for f in floors(summary(runs))}
    held = {what: f["held"] for what, f in found.items()}
    assert held == {
        "random / stock, fixed pool, 64 tokens": True,
        "random / stock, full pool, 64 tokens": False,
        "random / stock, full pool, 4096 tokens": True,
        "share of time in rounds, full pool, 4096 tokens": False,
    }
    lines = floor_lines({"floors": list(found.values())})
    assert [line.startswith("held") for line in lines] == list(held.values())


def test_tables_show_every_arm_and_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    result = measure(Desk(), [("fixed", 8192), ("full", 8192)], arms=("stock", "random", "gather"), repeats=2)
    Console(width=100).print(tables(result))
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.split()[:2] == ["full", "8192"] for line in lines) == 2 * 3  # nothing wrapped
    assert any("0.67 [0.67,0.67]" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arms", "stock,randon"], "randon"),
        (["--regimes", "half"], "half"),
        (["--lengths", "0"], "positive"),
        (["--lengths", "many"], "whole numbers"),
        (["--concurrency", "2", "--requests", "2", "--fit", "2"], "not full"),
    ],
)
def test_the_command_refuses_what_cannot_work(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["serve", *words])
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


@pytest.mark.vllm
def test_vllm_with_a_full_pool(tmp_path: Path) -> None:
    length, arms = 192, ("stock", "random", "blocks")
    result = serve.run(OPTIONS, [("full", length)], arms, 1, json_file=tmp_path / "serve.json", show=False)
    runs = {run["arm"]: run for run in result["runs"]}
    assert set(runs) == set(arms)
    assert all(run["tokens"] == OPTIONS.requests * length and run["cpu_s"] > 0 for run in runs.values())
    pool = OPTIONS.pool("full", length)
    assert all(run["pool"] == pool and 0 < run["blocks_peak"] <= pool for run in runs.values())
    assert runs["stock"]["preemptions"] > runs["random"]["preemptions"]
    assert runs["stock"]["running_mean"] < runs["random"]["running_mean"]
    assert runs["stock"]["concurrency"] == pytest.approx(OPTIONS.fit, rel=0.1)
    assert runs["random"]["concurrency"] > 1.5 * runs["stock"]["concurrency"]
    written = OPTIONS.prompt + length - 1  # the last token is never written
    rounds = 1 + (written - 1 - OPTIONS.budget - OPTIONS.buffer) // OPTIONS.buffer
    for arm in ("random", "blocks"):
        assert runs[arm]["rounds"] >= OPTIONS.requests * rounds  # more if preempted requests replay
    assert runs["stock"]["rounds"] == runs["stock"]["round_seconds"] == 0
    assert runs["random"]["moved_entries"] > 0 == runs["blocks"]["moved_entries"]
    assert 0 < runs["random"]["round_seconds"] < runs["random"]["wall_s"]


@pytest.mark.vllm
def test_an_engine_that_dies_says_why(tmp_path: Path) -> None:
    from kvkeep.bench.serve_engine import Engine

    engine = Engine({"model": str(tmp_path / "nowhere")}, threads=1, space=1, log=tmp_path / "log")
    try:
        with pytest.raises(RuntimeError, match="nowhere"):
            engine.ready()
    finally:
        engine.close()
