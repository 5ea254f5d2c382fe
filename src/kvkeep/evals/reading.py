"""A paragraph that reads the numbers of a comparison; it claims nothing an interval does not show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .arms import Arm
from .cells import Cell
from .compared import Pair, Pairs
from .run import Run
from .summary import scores_of


@dataclass(frozen=True)
class Contrast:
    """Two arms that differ in one thing.

    Attributes:
        a, b: labels.
        text: what the difference a - b is worth of, in words.
    """

    a: str
    b: str
    text: str


def read(run: Run, summary: Mapping[str, Any]) -> str:
    """One paragraph for each model and task.

    Args:
        run: the finished comparison.
        summary: what :func:`~kvkeep.evals.summary.summarise` made of it.
    """
    config = run.prepared.config
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in run.samples:
        lines.setdefault(row["cell"], []).append(row)
    pairs = Pairs(config, run.prepared.cells, {name: scores_of(rows) for name, rows in lines.items()})
    cells = {cell["id"]: cell for cell in summary["cells"]}
    found = []
    for model in run.prepared.models:
        for task in config.tasks:
            mine = [cell for cell in run.prepared.cells if (cell.model, cell.task) == (model.name, task)]
            found.append(" ".join(_sentences(pairs, mine, cells, model.caveat)))
    return "\n\n".join(found)


def _sentences(pairs: Pairs, mine: list[Cell], cells: Mapping[str, Any], caveat: str) -> Iterator[str]:
    first = cells[mine[0].id]
    yield f"{first['model']} on {first['task']}, {first['n']} problems, differences in {first['metric']}:"
    if full := next((cell for cell in mine if cell.budget is None), None):
        told = cells[full.id]
        yield f"the full cache reaches {told['accuracy']:.3f} [{told['low']:.3f}, {told['high']:.3f}]."
    else:
        yield "there is no full cache to compare with."
    unclear: dict[str, list[str]] = {}
    for contrast in contrasts(list(pairs.arms.values())):
        if text := _contrast(pairs, mine, contrast, unclear):
            yield text
    if unclear:
        texts = "; ".join(f"{who} {', '.join(where)}" for who, where in unclear.items())
        yield (
            f"What n = {first['n']} cannot tell apart (the interval holds 0): {texts}. "
            "That is not a finding of no difference."
        )
    yield from _warnings(mine, cells)
    if not pairs.config.primary:
        yield "No comparison was declared before the run, so all of this is exploratory."
    if caveat:
        yield caveat


def contrasts(arms: list[Arm]) -> Iterator[Contrast]:
    """Pairs of arms that differ in one thing, with what it is."""
    full = next((arm for arm in arms if not arm.evicts), None)
    evicting = [arm for arm in arms if arm.evicts]
    for a in evicting:
        for b in evicting:
            if a is not b and (text := _difference(a, b)):
                yield Contrast(a.label, b.label, text)
    for arm in evicting if full else []:
        assert full is not None
        yield Contrast(arm.label, full.label, f"{arm.label} against the full cache")


def _difference(a: Arm, b: Arm) -> str:
    """What sets ``a`` apart from ``b`` if it is one thing, "" otherwise (or if it is said the other way round)."""
    same_policy, same_options = a.policy == b.policy, a.options == b.options
    rest_a, rest_b = ({k: v for k, v in arm.values.items() if k != "protect"} for arm in (a, b))
    if rest_a != rest_b:
        return ""
    if same_policy and same_options and a.protect != b.protect:
        return f"protecting the prompt under {b.policy}" if (a.protect, b.protect) == ("prompt", "none") else ""
    if a.protect != b.protect:
        return ""
    if same_policy and a.policy == "random" and not a.options and set(b.options) in ({"draw"}, {"groups"}):
        if "groups" in b.options:
            return f"a draw for every head over one for each of {b.options['groups']} groups"
        shared = {"layer": "one for each layer", "model": "one for the whole model"}.get(str(b.options["draw"]))
        return f"a draw for every head over {shared}" if shared else ""
    if (a.policy, b.policy) == ("random", "recency") and not a.options:
        return "a random draw over a window"
    if b.policy in ("random", "recency") and not b.options and a.policy not in ("random", "recency"):
        return f"{a.label} over {b.label}"
    return ""


def _contrast(pairs: Pairs, mine: list[Cell], contrast: Contrast, unclear: dict[str, list[str]]) -> str:
    """A sentence with the difference at each budget; budgets that show nothing go to ``unclear``."""
    clear = []
    for cell in mine:
        if cell.arm != contrast.a:
            continue
        other = pairs.partner(cell, contrast.b)
        if other is None:
            continue
        told = pairs.compare(Pair(cell, other)).difference
        at = f"{cell.compression:g}x"
        numbers = f"{told.estimate:+.3f} [{told.low:+.3f}, {told.high:+.3f}]"
        if told.low > 0 or told.high < 0:
            clear.append(f"{numbers} at {at}")
        else:
            unclear.setdefault(f"{contrast.a} and {contrast.b}", []).append(f"at {at} ({numbers})")
    return f"{contrast.text[0].upper()}{contrast.text[1:]}: {', '.join(clear)}." if clear else ""


def _warnings(mine: list[Cell], cells: Mapping[str, Any]) -> Iterator[str]:
    told = [cells[cell.id] for cell in mine]
    if skipped := sum(cell["not_evicted"] for cell in told):
        yield f"{skipped} samples ended before a round ran and count as not evicted."
    cut = [cell for cell in told if cell["truncated"] > 0.1 * cell["n"] * cell["runs"]]
    if cut:
        yield f"More than a tenth of the traces was cut at the token limit in: {', '.join(_short(c) for c in cut)}."
    scored = [cell["accuracy"] for cell in told if cell["budget"] is not None and cell["metric"] == "accuracy"]
    if scored and (min(scored) > 0.95 or max(scored) < 0.05):
        yield "All evicting arms lie at one end of the scale: this task does not separate them."


def _short(cell: Mapping[str, Any]) -> str:
    return str(cell["arm"]) + ("" if cell["budget"] is None else f" at {cell['compression']:g}x")
