"""docs/add-a-method.md promises a method in one file, found through an entry point: do exactly that."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvkeep.testing.engine import ENGINE
from kvkeep.testing.fidelity import MADE
from test_load import tiny  # noqa: F401 - a fixture

PAGE = Path(__file__).parents[1] / "docs" / "add-a-method.md"
TEXT = PAGE.read_text()


def block(kind: str, name: str) -> str:
    """The code block that begins with the file's name."""
    found = re.search(rf"```{kind}\n(# {re.escape(name)}\b.*?)```", TEXT, re.S)
    assert found is not None, name
    return found[1]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that looks like site-packages with the page's three files installed in it."""
    code, project = block("python", "my_loud.py"), tomllib.loads(block("toml", "pyproject.toml"))
    assert len(code.splitlines()) <= 40
    [(group, entries)] = project["project"]["entry-points"].items()
    assert project["tool"]["setuptools"]["py-modules"] == ["my_loud"]
    site = tmp_path / "site"
    info = site / "my_loud-0.1.dist-info"
    info.mkdir(parents=True)
    (site / "my_loud.py").write_text(code)
    (site / "test_my_loud.py").write_text(block("python", "test_my_loud.py"))
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".format(**project["project"])
    )
    lines = [f"{name} = {value}\n" for name, value in entries.items()]
    (info / "entry_points.txt").write_text("".join([f"[{group}]\n", *lines]))
    return site


def run(site: Path, *words: str) -> str:
    """``python`` with these words; what it prints."""
    done = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": str(site), "COLUMNS": "200"},
        cwd=site,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def kvkeep(site: Path, *words: str) -> str:
    return run(site, "-c", "from kvkeep.cli import main; main()", *words)


def command(start: str) -> list[str]:
    """Words of the page's command that starts so, without what follows a #."""
    [line] = [line.split("#")[0] for line in TEXT.splitlines() if line.startswith(start)]
    return line.split()


@pytest.mark.slow
def test_it_is_listed_and_runs(installed: Path, tiny: Path, tmp_path: Path) -> None:  # noqa: F811
    assert "loud" in kvkeep(installed, "policies")
    stats = tmp_path / "stats.json"
    words = ["generate", "the cat sat on the mat", "--model", str(tiny), "--policy", "loud", "-o", "power=2"]
    kvkeep(installed, *words, "--budget", "16", "--buffer", "4", "--max-new-tokens", "60", "--stats-json", str(stats))
    found = json.loads(stats.read_text())
    assert found["settings"]["options"] == {"power": 2}
    assert found["stats"]["policy"] == "loud"


@pytest.mark.slow
def test_the_shared_checks_pass(installed: Path) -> None:
    said = run(installed, *command("python -m kvkeep.testing")[1:])
    assert said.count("passed  ") == 2 * (len(MADE) + len(ENGINE))
    assert said.endswith("all checks passed\n")


@pytest.mark.slow
def test_its_own_test_passes_and_can_fail(installed: Path) -> None:
    assert "2 passed" in run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_loud.py")
    code = installed / "my_loud.py"
    code.write_text(code.read_text().replace("length**self.power", "length"))
    with pytest.raises(AssertionError, match="by the reference"):
        run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_loud.py")


@pytest.mark.slow
def test_the_suite_checks_what_is_installed(installed: Path) -> None:
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent / "test_fidelity.py")]
    assert "1 passed" in run(installed, *words, "-k", "test_every_registered_policy and loud")


@pytest.mark.slow
def test_compare_takes_it(installed: Path) -> None:
    words = command("kvkeep compare")[1:]
    said = kvkeep(installed, *words, "--plan")
    assert "loud:power=2" in said
    assert "3 cells" in said


@pytest.mark.slow
def test_compare_runs_it(installed: Path) -> None:
    said = kvkeep(installed, *command("kvkeep compare")[1:], "--problems", "2", "--workers", "0")
    assert "2 problems" in said
    assert "0 came out differently" in said
    assert all(f" {arm} " in said for arm in ("random", "loud", "loud:power=2"))


def test_contributing_leads_there() -> None:
    text = (PAGE.parents[1] / "CONTRIBUTING.md").read_text()
    assert "(docs/add-a-method.md)" in text
    assert f"of {len(block('python', 'my_loud.py').splitlines())} lines" in text
