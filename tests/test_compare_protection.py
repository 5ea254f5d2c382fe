"""Arms with and without protection, drawn side by side; arms on their paper's own schedule, named in the tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from comparing import abacus_model, fake, fake_config  # noqa: F401 - fixtures
from kvkeep.evals.cli import carry_out
from kvkeep.report.protection_plot import panels, protection_figure

pytestmark = pytest.mark.usefixtures("fake")
BOTH = ["random", "random:protect=none", "snapkv:kernel=3", "snapkv:kernel=3,protect=none", "recency", "full"]


def test_policies_run_both_ways_get_a_figure(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    config = fake_config(abacus_model, *BOTH)
    summary = carry_out(config, tmp_path / "run", workers=0, json=None)
    found = panels(summary)
    assert found
    for policies in found.values():
        assert list(policies) == ["random", "snapkv:kernel=3"]  # recency ran one way only
        for policy, sides in policies.items():
            assert {side: cell["protect"] for side, cell in sides.items()} == {"on": "prompt", "off": "none"}
            assert all(cell["policy"] == policy for cell in sides.values())
    assert (tmp_path / "run" / "protection.png").read_bytes().startswith(b"\x89PNG")
    assert "protection.png" in (tmp_path / "run" / "report.md").read_text()


def test_without_two_such_policies_there_is_none(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    config = fake_config(abacus_model, "random", "random:protect=none", "recency")
    summary = carry_out(config, tmp_path / "run", workers=0, json=None)
    assert not protection_figure(summary, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    assert not (tmp_path / "run" / "protection.png").exists()
    assert "protection.png" not in (tmp_path / "run" / "report.md").read_text()


def test_tables_say_which_schedule_an_arm_ran(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    config = fake_config(abacus_model, "random", "tova:published=true", "full")
    summary = carry_out(config, tmp_path / "run", workers=0, json=None)
    told = {cell["arm"]: (cell["schedule"], cell["settings"]["buffer"]) for cell in summary["cells"]}
    assert told["random"][0] == "common"
    assert told["tova:published=true"] == ("published", 1)
    assert told["full"][0] == "-"
    assert "| schedule |" in (tmp_path / "run" / "report.md").read_text()
    plain = carry_out(fake_config(abacus_model), tmp_path / "plain", workers=0, json=None)
    assert all(cell["schedule"] in ("common", "-") for cell in plain["cells"])
    assert "| schedule |" not in (tmp_path / "plain" / "report.md").read_text()
