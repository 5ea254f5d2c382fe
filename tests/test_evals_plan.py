"""Cells and batches follow from the configuration alone, and budgets that cannot work are refused at once."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from comparing import abacus_model, fake, fake_config, save_tiny_abacus  # noqa: F401 - fixtures
from kvkeep.evals.arms import parse_arms
from kvkeep.evals.config import Config
from kvkeep.evals.run import prepare
from test_load import make_tokenizer

pytestmark = pytest.mark.usefixtures("fake")


def test_every_sample_is_planned_once(abacus_model: Path) -> None:  # noqa: F811
    made = prepare(fake_config(abacus_model, runs=3, batch=7))
    planned = [(b.cell, problem, run) for b in made.batches for problem, run in b.keys]
    assert len(planned) == len(set(planned)) == len(made.cells) * 20 * 3
    assert max(len(b.problems) for b in made.batches) <= 7
    sizes = {len(b.problems) for b in made.batches}
    assert max(sizes) - min(sizes) <= 1
    assert [b.number for b in made.batches + made.checks] == list(range(len(made.batches) + len(made.checks)))


def test_the_plan_is_the_same_every_time(abacus_model: Path) -> None:  # noqa: F811
    config = fake_config(abacus_model, check=6)
    assert prepare(config).batches == prepare(config).batches
    assert prepare(config).checks == prepare(config).checks
    assert prepare(replace(config, seed=1)).checks != prepare(config).checks


def test_rows_of_one_prompt_length_stay_together(abacus_model: Path) -> None:  # noqa: F811
    made = prepare(fake_config(abacus_model, "full", tasks=("fake:lengths=2",), batch=5))
    lengths = {item.id: len(item.prompt) for item in made.sets[0].items}
    assert all(len({lengths[problem] for problem in batch.problems}) == 1 for batch in made.batches)


def test_the_most_work_comes_first(abacus_model: Path) -> None:  # noqa: F811
    cells = {cell.id: cell for cell in prepare(fake_config(abacus_model)).cells}
    budgets = [cells[b.cell].budget for b in prepare(fake_config(abacus_model)).batches]
    assert budgets == sorted(budgets, key=lambda k: -(k or 10**9))


def test_a_budget_follows_from_the_length_and_is_the_same_for_every_arm(abacus_model: Path) -> None:  # noqa: F811
    made = prepare(fake_config(abacus_model))  # items are 100 tokens long
    assert {(c.compression, c.budget) for c in made.cells} == {(1.0, None), (2.0, 50), (4.0, 25)}
    assert [c.arm for c in made.cells].count("full") == 1
    made = prepare(fake_config(abacus_model, compressions=(), budgets=(40,)))
    assert {(c.compression, c.budget) for c in made.cells} == {(1.0, None), (2.5, 40)}


def test_checks_are_planned_rows_two_of_a_cell_at_most(abacus_model: Path) -> None:  # noqa: F811
    made = prepare(fake_config(abacus_model, check=16))
    planned = {(b.cell, key) for b in made.batches for key in b.keys}
    checked = [(b.cell, b.keys[0]) for b in made.checks]
    assert len(checked) == len(set(checked)) == 14  # 7 cells
    assert set(checked) <= planned
    assert prepare(fake_config(abacus_model, tasks=("fake:temperature=0.6",))).checks == []  # cannot be the same


@pytest.mark.parametrize(
    ("policy", "least"), [("random", 98 + 16), ("streaming", 4 + 16), ("random:buffer=32", 98 + 32)]
)
def test_a_prompt_that_does_not_fit_is_refused_with_what_works(
    policy: str,
    least: int,
    abacus_model: Path,  # noqa: F811
) -> None:
    def at(**level: tuple[float, ...]) -> Config:
        values = {"compressions": (), "budgets": (), **level}
        return Config((str(abacus_model),), ("abacus",), parse_arms([policy]), buffer=16, **values)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=re.escape(f"abacus:n=16,mode=r2 | {policy} | K=12")) as error:
        prepare(at(budgets=(12,)))
    assert f"The smallest K that works for this cell is {least}." in str(error.value)
    assert prepare(at(budgets=(least,))).cells[0].budget == least
    with pytest.raises(ValueError):
        prepare(at(budgets=(least - 1,)))
    with pytest.raises(ValueError) as error:
        prepare(at(compressions=(60.0,)))
    found = re.search(r"largest compression that works is ([0-9.]+)\.", str(error.value))
    assert found is not None
    assert prepare(at(compressions=(float(found[1]),))).cells[0].budget >= least  # type: ignore[operator]


def test_no_compression_works(abacus_model: Path) -> None:  # noqa: F811
    with pytest.raises(ValueError, match="No compression works"):
        prepare(fake_config(abacus_model, "random:window=95,buffer=2"))


def test_other_mistakes_name_the_cell(abacus_model: Path) -> None:  # noqa: F811
    with pytest.raises(ValueError, match=r"random:unit=4 \| 4x \(K=25\): unit=4 does not divide") as error:
        prepare(fake_config(abacus_model, "random:unit=4", compressions=(4.0,)))
    assert "smallest K" not in str(error.value)


def test_problems_must_lie_inside_the_models_context(tmp_path: Path) -> None:
    folder = save_tiny_abacus(tmp_path / "short", max_position_embeddings=800)
    config = Config((str(folder),), ("abacus:n=16,mode=r0",), parse_arms(["full"]))
    assert prepare(config).cells
    with pytest.raises(ValueError, match="outgrow the 800 positions"):
        prepare(replace(config, tasks=("abacus:n=24,mode=r2",)))


def test_abacus_needs_its_own_vocabulary(tmp_path: Path) -> None:
    folder = save_tiny_abacus(tmp_path / "other")
    make_tokenizer().save_pretrained(folder)
    with pytest.raises(ValueError, match="abacus problems need abacus's vocabulary"):
        prepare(Config((str(folder),), ("abacus",), parse_arms(["full"])))
