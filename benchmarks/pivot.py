"""Turn the JSON of ``kvkeep compare`` into the tables of the docs: one row an arm and budget, one column a model.

python benchmarks/pivot.py benchmarks/compare/table.json            # scores with intervals
python benchmarks/pivot.py benchmarks/compare/table.json --primary  # declared comparisons
"""

from __future__ import annotations

import json
import sys
from typing import Any


def number(value: float | None) -> str:
    """Two digits, without a leading zero."""
    return "open" if value is None else f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.2f}"


def span(low: float | None, high: float | None, sign: str = "") -> str:
    """An interval."""
    return f"[{sign_of(low, sign)}, {sign_of(high, sign)}]"


def sign_of(value: float | None, sign: str) -> str:
    """A number, with its sign if wanted."""
    return number(value) if not sign or value is None or value < 0 else "+" + number(value)


def table(head: list[str], rows: dict[tuple[str, ...], dict[str, str]], columns: list[str]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join([*head, *columns]) + " |", "| " + " | ".join("---" for _ in [*head, *columns]) + " |"]
    lines += ["| " + " | ".join([*key, *(cells.get(c, "-") for c in columns)]) + " |" for key, cells in rows.items()]
    return "\n".join(lines)


def scores(data: dict[str, Any]) -> str:
    """One row a task, arm and budget."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for cell in data["cells"]:
        key = (cell["task"], cell["arm"], f"{cell['compression']:g}x" if cell["budget"] else "1x")
        rows.setdefault(key, {})[cell["model"]] = f"{number(cell['value'])} {span(cell['low'], cell['high'])}"
    return table(["task", "arm", "at"], rows, models(data))


def primary(data: dict[str, Any]) -> str:
    """One row a declared comparison and budget."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for row in data["primary"]["comparisons"]:
        key = (row["task"], f"{row['a']} vs {row['b']}", f"{row['compression']:g}x")
        told = f"{sign_of(row['difference'], '+')} {span(row['low'], row['high'], '+')}"
        rows.setdefault(key, {})[row["model"]] = told + ("*" if row["p_holm"] < 0.05 else "")
    return table(["task", "comparison", "at"], rows, models(data))


def models(data: dict[str, Any]) -> list[str]:
    """In the order of the run."""
    return list(dict.fromkeys(cell["model"] for cell in data["cells"]))


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        given = json.load(file)
    print(primary(given) if "--primary" in sys.argv else scores(given))
