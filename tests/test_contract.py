"""docs/contract.md names tests that exist, and every pitfall has its verdict."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROWS = [line.split("|")[1:-1] for line in (ROOT / "docs" / "contract.md").read_text().splitlines() if line[:1] == "|"]
PITFALLS = {int(row[0]): row for row in ROWS if row[0].strip().isdigit()}


def test_every_pitfall_has_a_verdict() -> None:
    assert sorted(PITFALLS) == list(range(1, 34))
    for row in PITFALLS.values():
        assert re.match(r"(impossible|detected|shown)\b", row[2].strip()), row


def test_the_tests_it_names_exist() -> None:
    for number, row in PITFALLS.items():
        named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", row[3])
        assert named, f"row {number} names no test"
        for file, test in named:
            assert not test or f"def {test}(" in (ROOT / "tests" / file).read_text(), f"row {number}: {file}::{test}"
            assert (ROOT / "tests" / file).exists(), f"row {number}: {file}"
