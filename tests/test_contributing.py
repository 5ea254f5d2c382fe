"""CONTRIBUTING promises a policy in one file, found through an entry point: do exactly that."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from test_load import tiny  # noqa: F401 - a fixture

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder that looks like site-packages with the example installed in it."""
    code = re.search(r"```python\n(# my_stride\.py.*?)```", PAGE.read_text(), re.S)
    assert code is not None
    assert len(code[1].splitlines()) <= 40
    site = tmp_path / "site"
    info = site / "my_stride-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "my_stride.py").write_text(code[1])
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-stride\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvkeep.policies]\nstride = my_stride:Stride\n")
    return site


def run(site: Path, *words: str) -> str:
    code = "import sys; from kvkeep.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_example_is_listed_and_runs(installed: Path, tiny: Path, tmp_path: Path) -> None:  # noqa: F811
    assert "stride" in run(installed, "policies")
    stats = tmp_path / "stats.json"
    words = ["generate", "the cat sat", "--model", str(tiny), "--policy", "stride", "--budget", "16", "--buffer", "4"]
    run(installed, *words, "-o", "step=8", "--max-new-tokens", "60", "--stats-json", str(stats))
    found = json.loads(stats.read_text())
    assert found["settings"]["options"] == {"step": 8}
    assert found["stats"]["policy"] == "stride"


def test_the_example_keeps_what_it_says(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(installed))
    from my_stride import Stride

    from kvkeep.budget import Budget
    from kvkeep.protection import Protection
    from reference import Slots

    slots = Slots(Stride(step=4), Budget(12, 2), Protection.parse("prompt"), [3], [0], 1, 1)
    slots.rounds(30)
    kept = sorted(slots.kept().flatten().tolist())
    middle = [p for p in kept if 3 <= p < kept[-1] - 2]
    assert middle == [p for p in middle if p % 4 == 0] != []
