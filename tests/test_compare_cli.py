"""`kvkeep compare` and `kvkeep demo` as a user meets them, on a tiny random model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from comparing import abacus_model, save_tiny_abacus  # noqa: F401 - a fixture
from test_cli import kvkeep


@pytest.fixture
def question_file(tmp_path: Path) -> Path:
    """Questions in abacus's words, so that the tiny model's tokenizer can read them."""
    file = tmp_path / "questions.jsonl"
    rows = [{"question": f"? {name}", "answer": f"it is #### {i}"} for i, name in enumerate("abcdefgh")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.slow
def test_two_workers_write_what_one_process_would(
    abacus_model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["compare", "--model", str(abacus_model), "--task", "abacus:n=4,mode=r0", "--policy", "full", "--policy"]
    words += ["random:protect=none,label=bare", "--budget", "40", "--buffer", "8", "--problems", "6", "--batch", "4"]
    found = []
    for workers in ("2", "0"):
        file = tmp_path / f"{workers}.json"
        out = str(tmp_path / workers)
        assert kvkeep(monkeypatch, *words, "--texts", "--workers", workers, "--out", out, "--json", str(file)) == 0
        samples = [json.loads(line) for line in (tmp_path / workers / "samples.jsonl").read_text().splitlines()]
        found.append([{k: v for k, v in row.items() if k != "seconds"} for row in samples])
    assert found[0] == found[1]
    full, bare = json.loads(file.read_text())["cells"]
    assert full["rounds"] == 0 < bare["rounds"]
    assert bare["mean_bytes"] < full["mean_bytes"]
    assert (bare["arm"], bare["policy"], bare["protect"], bare["budget"]) == ("bare", "random", "none", 40)
    assert bare["peak_entries"] <= 48
    assert all(row["text"] for row in samples)
    said = capsys.readouterr().out
    assert "bare" in said
    assert "0 came out differently" in " ".join(said.split())


def test_plan_runs_nothing(
    abacus_model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["compare", "--model", str(abacus_model), "--plan", "--difference", "0.05", "--out", str(tmp_path / "run")]
    assert kvkeep(monkeypatch, *words, "--primary", "random vs recency") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "11 cells" in said
    assert "by the sign test, as one of 2 primary comparisons" in said
    assert "100 are not enough" in said
    assert not (tmp_path / "run").exists()
    assert kvkeep(monkeypatch, *words, "--problems", "5000") == 0
    assert "5000 are enough" in " ".join(capsys.readouterr().out.split())
    file = tmp_path / "plan.json"
    assert kvkeep(monkeypatch, *words, "--discordant", "0.06", "--json", str(file)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "two arms differ on 6% of them" in said
    plan = json.loads(file.read_text())
    assert 20 < plan["power"]["needed"] < 400
    assert len(plan["cells"]) == 11


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--policy", "randm"], "did you mean random?"),
        (["--task", "abacs"], "did you mean abacus?"),
        (["--compression", "2;4"], "--compression takes numbers"),
        (["--compression", "9"], "The smallest K that works for this cell is 114."),
        (["--attention", "sdap"], "unknown attention 'sdap': did you mean sdpa?"),
        (["--dtype", "float61"], "unknown dtype 'float61': did you mean float16"),
        (["--device", "cuda:77"], "device 'cuda:77' cannot be used"),
        (["--budget", "0"], "at least 1, got 0"),
        (["--engine", "vllm"], "unknown engine 'vllm': known are transformers"),
        (["--temperature", "0.6"], "task abacus takes no temperature"),
        (["--primary", "random vs nobody"], "there is no arm 'nobody'"),
        (["--plan", "--difference", "2"], "--difference must lie in (0, 1)"),
        (["--task", "questions:path=no.jsonl,grader=number"], "there is no file no.jsonl"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str],
    says: str,
    abacus_model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    assert kvkeep(monkeypatch, "compare", "--model", str(abacus_model), "--out", str(out), *words) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said
    assert not out.exists()  # refused before anything was written


@pytest.mark.slow
def test_a_worker_that_cannot_load_its_model_says_so(
    abacus_model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(abacus_model, broken)
    (broken / "model.safetensors").write_bytes(b"torn")
    words = ["compare", "--model", str(broken), "--task", "abacus:n=4", "--policy", "full", "--problems", "2"]
    assert kvkeep(monkeypatch, *words, "--workers", "1", "--out", str(tmp_path / "run")) == 2
    said = capsys.readouterr().err
    assert "abacus:n=4,mode=r2 | full | 1x" in said
    assert "Traceback" not in said
    assert "Traceback" in (tmp_path / "run" / "failure.log").read_text()


def test_questions_are_sampled_and_graded(
    abacus_model: Path,  # noqa: F811
    question_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvkeep.evals.tasks import questions

    monkeypatch.setattr(questions, "INSTRUCTION", "")  # abacus has no words for it
    words = ["compare", "--model", str(abacus_model), "--task", f"questions:path={question_file},grader=number"]
    words += ["--policy", "random", "--budget", "24", "--buffer", "8", "--problems", "8", "--runs", "2", "--texts"]
    words += ["--temperature", "1.0", "--max-new-tokens", "40", "--workers", "0", "--out", str(tmp_path / "run")]
    assert kvkeep(monkeypatch, *words) == 0
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    texts: dict[str, set[str]] = {}
    for row in samples:
        assert row["tokens"] <= 40
        wanted = questions.judge("number", row["text"], row["problem"])
        assert (row["answered"], row["score"]) == (wanted[0], float(wanted[1]))
        texts.setdefault(row["problem"], set()).add(row["text"])
    assert all(len(found) == 2 for found in texts.values())  # the two runs of a problem differ
    assert (tmp_path / "run" / "checks.jsonl").exists() is False or not (tmp_path / "run" / "checks.jsonl").read_text()


@pytest.mark.slow
def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_abacus(tmp_path / "model")
    (model / "kvkeep_model.json").write_text(json.dumps({"caveat": "Installed by training."}))
    words = ["demo", "--model", str(model), "--problems", "4", "--out", str(tmp_path / "demo")]
    assert kvkeep(monkeypatch, *words) == 0
    said = " ".join(capsys.readouterr().out.split())
    for text in ("random:draw=model", "the full cache's is", "Installed by training.", "score.png"):
        assert text in said
    cells = json.loads((tmp_path / "demo" / "cells.json").read_text())["cells"]
    assert len(cells) == 11
    assert {c["budget"] for c in cells} == {None, 338, 169}
