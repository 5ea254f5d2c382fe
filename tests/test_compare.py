"""Comparisons without a model: statistics, reports, readings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comparing import Fake, abacus_model, fake, fake_config, run_here, without_clock  # noqa: F401 - fixtures
from kvkeep.evals import stats
from kvkeep.evals.cli import carry_out
from kvkeep.evals.compared import mean_score
from kvkeep.evals.reading import read
from kvkeep.evals.summary import check, failures, same, scores_of, summarise
from kvkeep.evals.task import Item
from kvkeep.report.compare_tables import signed

pytestmark = pytest.mark.usefixtures("fake")
#: The promise of the command's ``--json``.
PROMISED = """
model task policy protect compression n accuracy low high diff_full diff_low diff_high mean_bytes peak_bytes rounds
not_evicted budget runs metric value p_full mean_entries peak_entries byte_compression answered truncated mean_tokens
seconds_per_problem seconds_per_solved metrics
"""


def cell(summary: dict[str, Any], arm: str, compression: float = 2.0) -> dict[str, Any]:
    return next(c for c in summary["cells"] if c["arm"] == arm and c["compression"] == compression)


def test_a_run_leaves_everything_behind(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    out, file = tmp_path / "run", tmp_path / "cells.json"
    summary = carry_out(fake_config(abacus_model), out, workers=0, json=file)
    made = {path.name for path in out.iterdir()}
    assert {
        "config.json",
        "environment.json",
        "samples.jsonl",
        "cells.json",
        "report.md",
        "score.png",
        "cost.png",
    } <= made
    assert (out / "score.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(file.read_text()) == json.loads((out / "cells.json").read_text())
    assert all(set(c) >= set(PROMISED.split()) for c in summary["cells"])
    assert json.loads(file.read_text(), parse_constant=pytest.fail)["cells"]  # no NaN or Infinity
    text = (out / "report.md").read_text()
    for words in (
        "random:protect=none",
        "Exploratory",
        "run again alone",
        "attention sdpa",
        "95% intervals covered",
        summary["cells"][0]["model"],
    ):
        assert words in text
    session = json.loads((out / "environment.json").read_text())["sessions"][0]
    assert set(session["fixed"]["models"][str(abacus_model)]) == {"config.json", "model.safetensors"}
    assert session["git"]["kvkeep"] is None or len(session["git"]["kvkeep"]["commit"]) == 40


def test_numbers_are_those_of_the_samples(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    config = fake_config(abacus_model, runs=3)
    run = run_here(config, tmp_path / "run")
    summary = summarise(run)
    for made in run.prepared.cells:
        outcomes = {f"p{i}": [Fake()._one(made.settings, Item(f"p{i}", (), 100, i), r, 1) for r in range(3)]
                    for i in range(20)}  # fmt: skip
        wanted = {name: [outcome.score for outcome in mine] for name, mine in outcomes.items()}
        mine = [row for row in run.samples if row["cell"] == made.id]
        assert scores_of(mine) == wanted
        found = next(c for c in summary["cells"] if c["id"] == made.id)
        assert found["accuracy"] == pytest.approx(mean_score(wanted))
        assert found["mean_bytes"] == 64 * (made.budget or 100)
        every = [outcome for runs in outcomes.values() for outcome in runs]
        assert found["mean_tokens"] == pytest.approx(sum(o.tokens for o in every) / 60)
        assert found["truncated"] == sum(o.truncated for o in every)
        assert found["answered"] == sum(o.answered for o in every)
        assert found["metrics"]["steps"] == pytest.approx(sum(o.metrics["steps"] for o in every) / 60)
        seconds, solved = sum(row["seconds"] for row in mine), sum(o.score for o in every)
        assert found["seconds_per_solved"] == (pytest.approx(seconds / solved) if solved else None)
    assert cell(summary, "random")["byte_compression"] == 2.0
    a, b = (scores_of([row for row in run.samples if f"| {arm} | {at}" in row["cell"]])
            for arm, at in (("random", "2x"), ("full", "1x")))  # fmt: skip
    assert cell(summary, "random")["diff_full"] == stats.compare(a, b).difference.estimate


def test_the_order_of_problems_changes_nothing(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    found = []
    for i, task in enumerate(("fake", "fake:reverse=true")):
        summary = summarise(run_here(fake_config(abacus_model, tasks=(task,)), tmp_path / str(i)))
        cells = [{k: v for k, v in c.items() if k not in ("id", "task")} for c in summary["cells"]]
        found.append(without_clock(cells))
    assert found[0] == found[1]


def test_primary_comparisons_are_declared_before_the_run(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    declared = fake_config(abacus_model, primary=["random vs random:protect=none", "random vs recency @2"])
    summary = summarise(run_here(declared, tmp_path / "declared"))
    family = summary["primary"]["comparisons"]
    assert [(c["a"], c["b"], c["compression"]) for c in family] == [
        ("random", "random:protect=none", 2.0), ("random", "random:protect=none", 4.0), ("random", "recency", 2.0)
    ]  # fmt: skip
    adjusted = stats.holm({str(i): c["p_sign"] for i, c in enumerate(family)})
    assert [c["p_holm"] for c in family] == list(adjusted.values())
    assert not any(c["exploratory"] for c in family)
    assert all(c["exploratory"] for c in summary["comparisons"])
    undeclared = fake_config(abacus_model)
    run_here(undeclared, tmp_path / "undeclared")
    with pytest.raises(ValueError, match="declared before a run, not after it"):
        run_here(replace(undeclared, primary=declared.primary), tmp_path / "undeclared")


def test_a_primary_comparison_with_the_full_cache(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    config = fake_config(abacus_model, primary=["random vs full"])
    family = summarise(run_here(config, tmp_path))["primary"]["comparisons"]
    assert [(c["b"], c["compression"]) for c in family] == [("full", 2.0), ("full", 4.0)]


def test_arms_are_compared_with_full_and_with_the_best_trivial_one(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    summary = summarise(run_here(fake_config(abacus_model, "full", "random", "recency", "random:draw=model"), tmp_path))
    kinds = {(c["a"], c["b"], c["kind"]) for c in summary["comparisons"] if c["compression"] == 2.0}
    best = max(("random", "recency"), key=lambda arm: cell(summary, arm)["accuracy"])
    assert {(arm, "full", "full") for arm in ("random", "recency", "random:draw=model")} <= kinds
    assert ("random:draw=model", best, "best trivial") in kinds
    assert not any(a == best and kind == "best trivial" for a, _, kind in kinds)


def test_scores_without_bounds_go_all_the_way(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    """The full cache's divergence from itself is 0 everywhere, which limits nothing."""
    config = fake_config(abacus_model, tasks=("fake:kl=true",), primary=["random vs recency"])
    summary = carry_out(config, tmp_path / "run", workers=0)
    full, random = cell(summary, "full", 1.0), cell(summary, "random")
    assert (full["accuracy"], full["low"], full["high"]) == (0.0, None, None)
    assert 0 < random["low"] < random["accuracy"] < random["high"]
    low, high = random["metric_intervals"]["perplexity"]
    assert low < random["metrics"]["perplexity"] < high
    text = (tmp_path / "run" / "report.md").read_text()
    assert "differences in kl (less is better): the full cache's is .000 [open, open]" in text
    assert (tmp_path / "run" / "score.png").exists()


def test_samples_without_a_round_are_counted_and_marked(
    abacus_model: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    summary = carry_out(fake_config(abacus_model, tasks=("fake:skip=0.3",)), tmp_path, workers=0)
    found = cell(summary, "random")["not_evicted"]
    assert 0 < found < 20
    assert cell(summary, "full", 1.0)["not_evicted"] == 0
    for text in (capsys.readouterr().out, (tmp_path / "report.md").read_text()):
        assert f"*{found}" in text
        assert "no round ran" in text


def test_a_cell_without_any_round_fails_the_run_after_writing_it(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(RuntimeError, match=r"random \| 2x: no round ran on any sample.*Lower the budget"):
        carry_out(fake_config(abacus_model, tasks=("fake:skip=1.0",)), tmp_path, workers=0)
    assert cell(json.loads((tmp_path / "cells.json").read_text()), "random")["not_evicted"] == 20


def test_samples_are_run_again_alone(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    run = run_here(fake_config(abacus_model, check=8), tmp_path / "same")
    assert check(run)["samples"] == 8
    assert check(run)["different"] == 0
    drifting = run_here(fake_config(abacus_model, check=8, tasks=("fake:drift=1.0",)), tmp_path / "drift")
    found = summarise(drifting)
    assert found["check"]["different"] == 8
    assert "8 of 8 samples came out differently alone" in failures(found)[0]
    few = {**found, "check": {"samples": 8, "different": 2}}
    assert failures(few) == []  # a near-tie may flip


def test_samples_without_text_agree_by_their_numbers() -> None:
    row = {"digest": "", "score": 0.5, "metrics": {"kl": 2.0}}
    assert same(row, {**row, "metrics": {"kl": 2.00001}})
    assert not same(row, {**row, "metrics": {"kl": 2.1}})
    assert not same(row, {**row, "metrics": {}})


def test_the_reading_says_what_the_numbers_say(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    (abacus_model / "kvkeep_model.json").write_text(json.dumps({"caveat": "made up: claims nothing"}))
    try:
        primary = ["random:protect=none vs full", "random vs recency @2"]
        run = run_here(fake_config(abacus_model, problems=100, primary=primary), tmp_path)
    finally:
        (abacus_model / "kvkeep_model.json").unlink()
    summary = summarise(run)
    text = read(run, summary)
    declared, _, exploratory = text.partition("Exploratory")
    told = next(c for c in summary["primary"]["comparisons"] if c["b"] == "full")
    assert f"Random:protect=none against the full cache: {signed(told['difference'])} [" in declared
    assert "(Holm p = " in declared
    assert "Protecting the prompt under random: +." in exploratory
    unclear = exploratory.partition("cannot tell apart: ")[2]
    assert "random and recency " in unclear
    assert "at 2x (Holm p = " in unclear
    assert text.endswith("Made up: claims nothing.")
    assert all(c["caveat"] == "made up: claims nothing" for c in summary["cells"])
    bare = run_here(fake_config(abacus_model), tmp_path / "bare")
    assert "No comparison was declared" in read(bare, summarise(bare))


def test_a_declared_difference_that_holm_does_not_bear_is_not_claimed(
    abacus_model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = run_here(fake_config(abacus_model, problems=100, primary=["random vs full"]), tmp_path)
    assert "Random against the full cache" in read(run, summarise(run))
    monkeypatch.setattr(stats, "holm", lambda p: dict.fromkeys(p, 0.2))
    text = read(run, summarise(run))
    assert "Random against the full cache" not in text
    assert "(Holm p = 0.2)" in text.partition("cannot tell apart")[2]


def test_a_task_that_separates_nothing_is_called_so(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    run = run_here(fake_config(abacus_model, "full", "random:protect=none", problems=60), tmp_path)
    assert "at one end of the scale" not in read(run, summarise(run))
    for row in run.samples:
        row["score"] = 1.0
    assert "at one end of the scale" in read(run, summarise(run))
