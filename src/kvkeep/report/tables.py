"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str | None = None) -> Table:
    """A table whose first column is left-aligned and whose numbers are right-aligned."""
    made = Table(title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    made.pad_edge, made.padding = False, (0, 1, 0, 0)  # a wide table must fit 80 columns
    cells = [[str(cell) for cell in row] for row in rows]
    for i, name in enumerate(columns):
        numeric = i > 0 and all(row[i][:1].isdigit() or row[i] in ("", "-") for row in cells)
        made.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        made.add_row(*row)
    return made


def mib(size: float) -> str:
    """Bytes as MiB."""
    return f"{size / 2**20:.2f} MiB"
