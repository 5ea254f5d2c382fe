"""Results folders of comparisons: whose they are, what is resumed, what is refused; nothing is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comparing import Fake, abacus_model, fake, fake_config, run_here, without_clock  # noqa: F401 - fixtures
from kvkeep.evals import folder as folder_module
from kvkeep.evals.engines import Backend
from kvkeep.evals.pool import BatchFailed
from kvkeep.evals.run import prepare
from kvkeep.evals.summary import summarise

pytestmark = pytest.mark.usefixtures("fake")


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
        ({"backend": {"attention": "eager"}}, 'backend.attention is "sdpa" there and "eager" now'),
        ({"backend": {"dtype": "bfloat16"}}, 'backend.dtype is "float32" there and "bfloat16" now'),
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
    if "backend" in changes:
        changes = {"backend": Backend("fake", **changes["backend"])}
    with pytest.raises(ValueError, match=says):
        run_here(replace(config, **changes), tmp_path)
    assert (tmp_path / "samples.jsonl").read_bytes() == before


def half(folder: Path) -> None:
    """As if the run had been killed in the middle."""
    file = folder / "samples.jsonl"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("all_versions", {"torch": "9.9"}, r"was begun with versions.torch .* this is \"9.9\""),
        ("code_sha256", "other", r"was begun with code .* this is \"other\""),
    ],
)
def test_other_code_is_refused_unless_allowed_and_then_marked(
    name: str,
    value: Any,
    says: str,
    abacus_model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = fake_config(abacus_model)
    assert not summarise(run_here(config, tmp_path))["mixed"]
    half(tmp_path)
    real = getattr(folder_module.environment, name)()
    changed = {**real, **value} if isinstance(real, dict) else value
    monkeypatch.setattr(folder_module.environment, name, lambda: changed)
    with pytest.raises(ValueError, match=says):
        run_here(config, tmp_path)
    assert summarise(run_here(config, tmp_path, allow_mixed=True))["mixed"]
    assert summarise(run_here(config, tmp_path))["mixed"]  # nothing is left to run; the mark stays


def test_a_finished_folder_is_summed_up_by_any_version(
    abacus_model: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = fake_config(abacus_model)
    before = summarise(run_here(config, tmp_path))
    monkeypatch.setattr(folder_module.environment, "code_sha256", lambda: "other")
    assert summarise(run_here(config, tmp_path)) == before
    assert "nothing was run again" in " ".join(capsys.readouterr().err.split())
    assert len(json.loads((tmp_path / "environment.json").read_text())["sessions"]) == 1


def test_a_folder_without_samples_may_be_begun_again(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(BatchFailed):
        run_here(fake_config(abacus_model, tasks=("fake:fail=p0",), problems=2, batch=2), tmp_path)
    assert "ArithmeticError" in (tmp_path / "failure.log").read_text()
    assert summarise(run_here(fake_config(abacus_model), tmp_path))["cells"]


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


def test_one_writer_at_a_time(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    with folder_module.locked(tmp_path), pytest.raises(ValueError, match="another process writes"):
        run_here(fake_config(abacus_model), tmp_path)


def test_other_weights_are_refused(abacus_model: Path, tmp_path: Path) -> None:  # noqa: F811
    config = fake_config(abacus_model)
    run_here(config, tmp_path)
    prepared = prepare(config)
    swapped = replace(prepared, models=[replace(prepared.models[0], identity={"model.safetensors": "0"})])
    with pytest.raises(ValueError, match="results of other weights"):
        folder_module.join(tmp_path, swapped, folder_module.environment.cores(), True, todo=False)
