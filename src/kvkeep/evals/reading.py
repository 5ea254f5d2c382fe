"""A paragraph that reads the numbers of a comparison.

It claims nothing an interval does not show, nor of a declared comparison what Holm's correction does not bear.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..report.compare_tables import number, signed
from .arms import Arm
from .cells import Cell
from .compared import ALPHA, Pair, Pairs, adjusted
from .run import Run
from .summary import pair_up


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


def read(run: Run, summary: Mapping[str, Any], pairs: Pairs | None = None) -> str:
    """One paragraph for each model and task.

    Args:
        run: the finished comparison.
        summary: what :func:`~kvkeep.evals.summary.summarise` made of it.
        pairs: what :func:`~kvkeep.evals.summary.pair_up` made of it, if it is there already.
    """
    config = run.prepared.config
    pairs = pairs or pair_up(run)
    cells = {cell["id"]: cell for cell in summary["cells"]}
    holm = {pair.id: p for pair, p in adjusted(pairs)}
    found = []
    for model in run.prepared.models:
        for task in config.tasks:
            mine = [cell for cell in run.prepared.cells if (cell.model, cell.task) == (model.name, task)]
            found.append(" ".join(_sentences(pairs, mine, cells, holm, model.caveat)))
    return "\n\n".join(found)


@dataclass
class _Told:
    """Sentences of one model and task, by how far they can be trusted.

    Attributes:
        declared: contrasts declared before the run that are significant after Holm's correction.
        exploratory: other contrasts whose interval does not hold 0.
        unclear: budgets at which a pair cannot be told apart.
    """

    declared: list[str] = field(default_factory=list)
    exploratory: list[str] = field(default_factory=list)
    unclear: dict[str, list[str]] = field(default_factory=dict)


def _sentences(
    pairs: Pairs, mine: list[Cell], cells: Mapping[str, Any], holm: Mapping[str, float], caveat: str
) -> Iterator[str]:
    first = cells[mine[0].id]
    better = "" if pairs.upward(mine[0]) else " (less is better)"
    yield f"{first['model']} on {first['task']}, {first['n']} problems, differences in {first['metric']}{better}:"
    if full := next((cell for cell in mine if cell.budget is None), None):
        told = cells[full.id]
        yield f"the full cache's is {number(told['accuracy'])} [{number(told['low'])}, {number(told['high'])}]."
    else:
        yield "the full cache is not among the arms."
    said = _Told()
    for contrast in contrasts(list(pairs.arms.values())):
        _contrast(pairs, mine, contrast, holm, said)
    if said.declared:
        yield f"Declared before the run, and significant after Holm's correction: {' '.join(said.declared)}"
    if said.exploratory:
        yield f"Exploratory, reasons to run again: {' '.join(said.exploratory)}"
    if said.unclear:
        texts = "; ".join(f"{who} {', '.join(where)}" for who, where in said.unclear.items())
        yield f"What n = {first['n']} cannot tell apart: {texts}. That is not a finding of no difference."
    yield from _warnings(mine, cells)
    if not pairs.config.primary:
        yield "No comparison was declared before the run."
    if caveat:
        yield caveat[0].upper() + caveat[1:] + ("" if caveat.endswith(".") else ".")


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


def _contrast(pairs: Pairs, mine: list[Cell], contrast: Contrast, holm: Mapping[str, float], said: _Told) -> None:
    """Put the difference at each budget where it belongs."""
    declared: list[str] = []
    exploratory: list[str] = []
    for cell in mine:
        other = pairs.partner(cell, contrast.b) if cell.arm == contrast.a else None
        if other is None:
            continue
        told = pairs.compare(Pair(cell, other)).difference
        p = next((holm[pair.id] for pair in (Pair(cell, other), Pair(other, cell)) if pair.id in holm), None)
        text = f"{signed(told.estimate)} [{signed(told.low)}, {signed(told.high)}] at {cell.compression:g}x"
        if p is not None:
            text += f" (Holm p = {p:.2g})"
        if (told.low > 0 or told.high < 0) and (p is None or p <= ALPHA):
            (exploratory if p is None else declared).append(text)
        else:
            said.unclear.setdefault(f"{contrast.a} and {contrast.b}", []).append(text)
    name = contrast.text[0].upper() + contrast.text[1:]
    if declared:
        said.declared.append(f"{name}: {', '.join(declared)}.")
    if exploratory:
        said.exploratory.append(f"{name}: {', '.join(exploratory)}.")


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
