"""The complete list of batches, made from the configuration alone.

Every batch is run as planned, whatever was already done, so a run that was killed and resumed gives the results of
one that was not.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .cells import Cell, ItemSet
from .config import Config
from .task import Item
from .tasks import make_task


@dataclass(frozen=True)
class Batch:
    """Rows that run together.

    Attributes:
        number: names the batch; batches run in this order.
        cell: id of its cell.
        problems: id of each row's problem.
        samples: sample number of each row: its run.
        tokens: expected tokens, prompts included.
    """

    number: int
    cell: str
    problems: tuple[str, ...]
    samples: tuple[int, ...]
    tokens: int

    @property
    def keys(self) -> list[tuple[str, int]]:
        """Problem and run of each row."""
        return list(zip(self.problems, self.samples, strict=True))


def make_batches(config: Config, cells: Sequence[Cell], sets: Sequence[ItemSet]) -> list[Batch]:
    """Batches of all cells, the most work first, so that no worker idles at the end.

    Rows of one prompt length stay together; a cell's batches differ in size by one row at most.
    """
    found: list[tuple[float, Cell, list[tuple[Item, int]]]] = []
    by_name = {(s.model, s.task): s.items for s in sets}
    for cell in cells:
        items = by_name[cell.model, cell.task]
        rows = [(item, run) for run in range(config.runs) for item in items]
        rows.sort(key=lambda row: len(row[0].prompt))
        for part in _even(rows, config.batch):
            found.append((_work(cell, part), cell, part))
    found.sort(key=lambda entry: -entry[0])  # stable: equals stay in the order of cells
    return [_batch(number, cell, rows) for number, (_, cell, rows) in enumerate(found)]


def make_checks(config: Config, cells: Sequence[Cell], batches: Sequence[Batch]) -> list[Batch]:
    """Samples that are run again alone, spread over the cells; none where tokens are sampled at random.

    A random choice of tokens depends on the batch by construction, so only greedy and forced tasks can be checked.
    """
    greedy = {text for text in config.tasks if not getattr(make_task(text), "temperature", 0)}
    rng = random.Random(f"check-{config.seed}")
    candidates = {
        cell.id: [(batch, i) for batch in batches if batch.cell == cell.id and len(batch.problems) > 1
                  for i in range(len(batch.problems))]
        for cell in cells if cell.task in greedy
    }  # fmt: skip
    order = [name for name, rows in candidates.items() if rows]
    rng.shuffle(order)
    found: list[Batch] = []
    taken: set[tuple[str, str, int]] = set()
    for name in order * 2:  # two of a cell at most
        batch, i = rng.choice(candidates[name])
        key = (name, batch.problems[i], batch.samples[i])
        if key in taken or len(found) == config.check:
            continue
        taken.add(key)
        tokens = batch.tokens // len(batch.problems)
        found.append(Batch(len(batches) + len(found), name, (key[1],), (key[2],), tokens))
    return found


def _batch(number: int, cell: Cell, rows: Sequence[tuple[Item, int]]) -> Batch:
    return Batch(
        number,
        cell.id,
        tuple(item.id for item, _ in rows),
        tuple(run for _, run in rows),
        sum(item.length for item, _ in rows),
    )


def _even(rows: list[tuple[Item, int]], most: int) -> list[list[tuple[Item, int]]]:
    count = -(-len(rows) // most)
    edges = [len(rows) * i // count for i in range(count + 1)]
    return [rows[a:b] for a, b in pairwise(edges)]


def _work(cell: Cell, rows: Sequence[tuple[Item, int]]) -> float:
    """A step costs the weights (as much as some hundred entries) and the entries it attends to."""
    longest = max(item.length for item, _ in rows)
    return len(rows) * longest * (256.0 + min(cell.budget or longest, longest))
