"""The command line as a user meets it: real commands on a tiny saved model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep import __version__
from kvkeep.cli import main
from kvkeep.policies import policies
from test_load import tiny  # noqa: F401 - a fixture


def kvkeep(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run the command line in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["kvkeep", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_generate_streams_text_and_writes_stats(
    tiny: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stats = tmp_path / "out" / "stats.json"
    words = ["generate", "the cat sat on a mat", "--model", str(tiny), "--budget", "16", "--buffer", "4"]
    words += ["--max-new-tokens", "60", "--no-chat", "-o", "draw=layer", "--stats-json", str(stats)]
    assert kvkeep(monkeypatch, *words) == 0
    said = capsys.readouterr()
    found = json.loads(stats.read_text())
    assert said.out.split() == found["text"].split()
    assert found["settings"]["options"] == {"draw": "layer"}
    assert found["stats"]["entries"] <= 20
    assert found["stats"]["rounds"] == (6 + found["tokens"] - 1 - 20) // 4 + 1 or found["tokens"] < 20
    assert found["versions"]["kvkeep"] == __version__


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["generate", "  "], "the prompt is empty"),
        (["generate", "x", "--policy", "randm"], "did you mean random?"),
        (["generate", "x", "--budget", "32"], "budget 32 is not larger than the buffer 64"),
        (["generate", "x", "--model", "./no/such/folder"], "there is no folder no/such/folder"),
        (["generate", "x", "--temperature", "nan"], "temperature must be a finite number"),
        (["generate", "x", "-o", "draw"], "--option takes name=value"),
        (["generate", "x", "-o", "drew=head"], "has no option 'drew'"),
        (["generate", "x", "-o", "unit=3", "--budget", "64", "--buffer", "16"], "unit=3 does not divide"),
        (["generate", "x", "--protect", "prompts"], "protection 'prompts' is not understood"),
        (["generate", "x", "--scope", "all"], "scope must be one of total, trace, grow"),
        (["bench", "round", "--budget", "a,b"], "--budget takes whole numbers"),
        (["bench", "memory", "--limit", "0"], "--limit must be more than 0"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvkeep(monkeypatch, *words) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said


def test_a_prompt_that_does_not_fit(
    tiny: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["generate", "the cat sat on a mat", "--model", str(tiny), "--budget", "8", "--buffer", "4"]
    assert kvkeep(monkeypatch, *words) == 2
    said = capsys.readouterr()
    assert "the prompt does not fit" in said.err
    assert said.out.strip() == ""  # refused before any token


def test_policies_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "policies.json"
    assert kvkeep(monkeypatch, "policies", "--json", str(file)) == 0
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert set(rows) == set(policies())
    assert rows["random"]["signals"] == []
    assert rows["streaming"]["published_protection"] == "sinks:4"


@pytest.mark.parametrize(
    "command", [[], ["generate"], ["policies"], ["compare"], ["demo"], ["bench"], ["bench", "round"]]
)
def test_help(command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvkeep(monkeypatch, *command, "--help") == 0
    assert "Usage" in capsys.readouterr().out


def test_help_needs_no_torch_models() -> None:
    """A newcomer's first command answers at once: the engine is imported only when it is used."""
    code = "import sys, kvkeep.cli; assert 'transformers' not in sys.modules, 'transformers was imported'"
    subprocess.run([sys.executable, "-c", code], check=True)
