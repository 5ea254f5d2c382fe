"""Comparisons without a model: folders, resumes, statistics, reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comparing import Fake, abacus_model, fake, fake_config, run_here, without_clock  # noqa: F401 - fixtures
from kvkeep.evals import folder as folder_module
from kvkeep.evals import stats
from kvkeep.evals.cli import carry_out
from kvkeep.evals.compared import mean_score
from kvkeep.evals.pool import BatchFailed
from kvkeep.evals.reading import read
from kvkeep.evals.run import prepare
from kvkeep.evals.summary import check, failures, same, scores_of, summarise

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
        wanted = {f"p{i}": [Fake()._one(made.settings, type("I", (), {"id": f"p{i}"})(), r, 1).score for r in range(3)]
                  for i in range(20)}  # fmt: skip
        mine = [row for row in run.samples if row["cell"] == made.id]
        assert scores_of(mine) == wanted
        found = next(c for c in summary["cells"] if c["id"] == made.id)
        assert found["accuracy"] == pytest.approx(mean_score(wanted))
        assert found["mean_bytes"] == 64 * (made.budget or 100)
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


def test_what_is_done_is_not_done_again(
    abacus_model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = fake_config(abacus_model)
    first = run_here(config, tmp_path)
    monkeypatch.setattr(Fake, "run", lambda *args: pytest.fail("ran again"))
    again = run_here(config, tmp_path)
    assert again.samples == first.samples


@pytest.mark.parametrize("lost", [1, 300, 3000])
def test_a_torn_file_is_completed_to_the_same_results(
    abacus_model: Path,  # noqa: F811
    tmp_path: Path,
    lost: int,
) -> None:
    config = fake_config(abacus_model)
    whole = run_here(config, tmp_path / "whole")
    torn = tmp_path / "torn"
    run_here(config, torn)
    for name in ("samples.jsonl", "checks.jsonl"):
        data = (torn / name).read_bytes()
        (torn / name).write_bytes(data[: max(0, len(data) - lost)])
    again = run_here(config, torn)
    assert without_clock(again.samples) == without_clock(whole.samples)
    assert without_clock(summarise(again)) == without_clock(summarise(whole))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"problems": 21}, "problems is 20 there and 21 now"),
        ({"seed": 1}, "seed is 0 there and 1 now"),
        ({"compressions": (2.0,)}, r"compressions is \[2.0, 4.0\] there and \[2.0\] now"),
        ({"batch": 5}, "batch is 6 there and 5 now"),
        ({"tasks": ("fake:skip=0.1",)}, r"tasks\[0\] is \"fake\" there"),
    ],
)
def test_another_comparison_is_refused(
    abacus_model: Path,  # noqa: F811
    tmp_path: Path,
    changes: dict[str, Any],
    says: str,
) -> None:
    config = fake_config(abacus_model)
    run_here(config, tmp_path)
    before = (tmp_path / "samples.jsonl").read_bytes()
    with pytest.raises(ValueError, match=says):
        run_here(replace(config, **changes), tmp_path)
    assert (tmp_path / "samples.jsonl").read_bytes() == before


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


def test_other_versions_are_refused_unless_allowed_and_then_marked(
    abacus_model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = fake_config(abacus_model)
    assert not summarise(run_here(config, tmp_path))["mixed"]
    real = folder_module.environment.all_versions()
    monkeypatch.setattr(folder_module.environment, "all_versions", lambda: {**real, "torch": "9.9"})
    with pytest.raises(ValueError, match=r"was begun with versions.torch .* this is \"9.9\""):
        run_here(config, tmp_path)
    assert summarise(run_here(config, tmp_path, allow_mixed=True))["mixed"]
    with pytest.raises(ValueError, match=r"versions\.torch"):  # the mark stays, and so does the question
        run_here(config, tmp_path)


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


def test_a_batch_that_fails_names_its_cell_and_leaves_the_rest(
    abacus_model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = fake_config(abacus_model, tasks=("fake:fail=p13",))
    with pytest.raises(BatchFailed, match=r"cell .* \| full \| 1x, batch \d+ failed: ArithmeticError: the sky fell"):
        run_here(config, tmp_path)
    assert (tmp_path / "samples.jsonl").read_text().count("\n") > 0
    assert not (tmp_path / "cells.json").exists()
    broken = Fake._one
    monkeypatch.setattr(Fake, "_one", lambda self, *rest: broken(replace(self, fail=""), *rest))
    assert len(run_here(config, tmp_path).samples) == 7 * 20  # goes on where it failed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"score": float("nan")}, "score is nan"),
        ({"stats": {}}, "did not report rounds, evicted"),
        ({"metrics": {"steps": float("inf")}}, "steps is inf"),
    ],
)
def test_no_sample_is_ever_a_hole(
    abacus_model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    says: str,
) -> None:
    whole = Fake._one
    monkeypatch.setattr(Fake, "_one", lambda self, *rest: replace(whole(self, *rest), **change))
    with pytest.raises(BatchFailed, match=says):
        run_here(fake_config(abacus_model), tmp_path)


def test_more_entries_than_the_budget_fail_the_run(
    abacus_model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = Fake._one

    def greedy(self: Fake, *rest: Any) -> Any:
        made = whole(self, *rest)
        return replace(made, stats={**made.stats, "peak_entries": 55})  # K + r = 54

    monkeypatch.setattr(Fake, "_one", greedy)
    with pytest.raises(BatchFailed, match=r"55 entries a head are more than K \+ r = 54"):
        run_here(fake_config(abacus_model, "random", compressions=(2.0,)), tmp_path)


def test_a_missing_sample_is_an_error(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    run = run_here(fake_config(abacus_model), tmp_path)
    with pytest.raises(RuntimeError, match="has 19 of its 20 samples"):
        summarise(replace(run, samples=run.samples[1:]))


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
    (abacus_model / "kvkeep_model.json").write_text(json.dumps({"caveat": "Made up: claims nothing."}))
    try:
        run = run_here(fake_config(abacus_model, problems=100), tmp_path)
    finally:
        (abacus_model / "kvkeep_model.json").unlink()
    summary = summarise(run)
    text = read(run, summary)
    told = next(c for c in summary["comparisons"] if (c["a"], c["b"]) == ("random:protect=none", "full"))
    assert f"Random:protect=none against the full cache: {told['difference']:+.3f}" in text
    assert "Protecting the prompt under random: +0." in text
    assert "cannot tell apart (the interval holds 0): random and recency at 2x" in text
    assert "so all of this is exploratory" in text
    assert text.endswith("Made up: claims nothing.")


def test_one_writer_at_a_time(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    with folder_module.locked(tmp_path), pytest.raises(ValueError, match="another process writes"):
        run_here(fake_config(abacus_model), tmp_path)


def test_other_weights_are_refused(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    config = fake_config(abacus_model)
    run_here(config, tmp_path)
    prepared = prepare(config)
    swapped = replace(prepared, models=[replace(prepared.models[0], identity={"model.safetensors": "0"})])
    with pytest.raises(ValueError, match="results of other weights"):
        folder_module.claim(tmp_path, swapped, folder_module.environment.cores(), True)
