"""Cells of a comparison: one model, one task, one arm, one budget."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from math import floor
from statistics import fmean
from typing import Any

from ..budget import Budget
from ..policies import make_policy
from ..settings import Settings
from .arms import Arm
from .config import Config
from .models import Model
from .task import Item
from .tasks import make_task


@dataclass(frozen=True)
class ItemSet:
    """The problems of one task as one model's tokenizer reads them."""

    model: str
    task: str
    items: tuple[Item, ...]

    @property
    def length(self) -> float:
        """Mean tokens of prompt and expected trace; a compression is vague where items of a task differ much."""
        return fmean(item.length for item in self.items)

    @property
    def digest(self) -> str:
        """Changes when a problem, its answer or the tokenizer does."""
        said = [[item.id, list(item.prompt), item.length, _plain(item.data)] for item in self.items]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Cell:
    """One model, one task, one arm, one budget.

    Attributes:
        id: names the cell in files and messages.
        model, task, arm: what they are called.
        level: compression or budget the user asked for; 1 for an arm that never evicts.
        compression: nominal: mean length / K, as asked for where a compression was given.
        budget: K; None for an arm that never evicts.
        settings: policy, K, r, protection, seed.
    """

    id: str
    model: str
    task: str
    arm: str
    level: float
    compression: float
    budget: int | None
    settings: Settings

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {**{k: v for k, v in vars(self).items() if k != "settings"}, "settings": self.settings.to_dict()}


def _plain(data: Any) -> Any:
    """What a task keeps of a problem, ready for JSON.

    Raises:
        ValueError: there is something in it that has no text of its own.
    """
    if data is None or isinstance(data, str | int | float):
        return data
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    if is_dataclass(data):
        return {f.name: _plain(getattr(data, f.name)) for f in fields(data)}
    raise ValueError(
        f"a problem's data holds a {type(data).__name__}: use dataclasses, dicts, lists, strings and numbers, so that "
        "a resumed run can tell whether its problems are the same"
    )


def make_sets(config: Config, models: Sequence[Model]) -> list[ItemSet]:
    """The problems of every task for every model.

    Raises:
        ValueError: a task has too few problems, an id twice, or a problem that outgrows the model's context.
    """
    found = []
    for model in models:
        for text in config.tasks:
            task = make_task(text)
            items = task.items(model.tokenizer, config.problems, config.seed)
            if len(items) < config.problems:
                raise ValueError(f"{text} has {len(items)} problems: lower --problems from {config.problems}")
            if len({item.id for item in items}) != len(items):
                raise ValueError(f"{text} gave two problems one id; statistics pair arms by it")
            _check_context(model, task, items)
            found.append(ItemSet(model.name, text, tuple(items)))
    return found


def make_cells(config: Config, sets: Sequence[ItemSet]) -> list[Cell]:
    """All cells, in the order of the configuration; arms that never evict have one cell each model and task.

    Raises:
        ValueError: a prompt does not fit; names the cell, and the smallest K or the largest compression that works.
    """
    found = []
    for items in sets:
        for arm in config.arms:
            if not arm.evicts:
                settings = arm.settings(None, config.buffer, config.seed)
                found.append(_cell(items, arm, 1.0, 1.0, None, settings))
                continue
            for level in config.levels:
                budget = int(level) if config.budgets else round(items.length / level)
                name = _name(items, arm, f"K={budget}" if config.budgets else f"{level:g}x")
                compression = round(items.length / budget, 2) if config.budgets else level
                settings = _settings(config, items, arm, budget, name)
                found.append(_cell(items, arm, level, compression, settings.budget, settings, name))
    return found


def _cell(
    items: ItemSet, arm: Arm, level: float, compression: float, budget: int | None, settings: Settings, name: str = ""
) -> Cell:
    return Cell(
        name or _name(items, arm, "1x"), items.model, items.task, arm.label, level, compression, budget, settings
    )


def _name(items: ItemSet, arm: Arm, level: str) -> str:
    return f"{items.model} | {items.task} | {arm.label} | {level}"


def _settings(config: Config, items: ItemSet, arm: Arm, budget: int, name: str) -> Settings:
    try:
        settings = arm.settings(budget, config.buffer, config.seed)
        asked = settings.make_budget()
        assert asked is not None
        for length in sorted({len(item.prompt) for item in items.items}):
            prefix = settings.protection.prefix(length)
            asked.for_prompt(length, prefix + settings.protection.pinned(prefix))
    except ValueError as error:
        where = "" if config.budgets else f" (K={budget})"
        raise ValueError(f"cell {name}{where}: {error}{_advice(config, items, arm, budget)}") from error
    return settings


def _advice(config: Config, items: ItemSet, arm: Arm, budget: int) -> str:
    """The smallest K that works, if more is what is needed."""
    roomy = arm.settings(2**40, None, 0)
    own = make_policy(arm.policy, arm.options).schedule(budget) if arm.published else {}
    given = {**own, **arm.values}
    every = int(given.get("buffer", config.buffer))
    window = int(given.get("window", every))
    longest = max(len(item.prompt) for item in items.items)
    prefix = roomy.protection.prefix(longest)
    must_stay = prefix + roomy.protection.pinned(prefix)
    least = max(every + 1, window, must_stay + window if _counts_all(roomy.make_budget()) else 0)
    if budget >= least:  # something else is wrong
        return ""
    largest = floor(items.length / least * 100) / 100
    more = f" The largest compression that works is {largest:g}." if largest >= 1 else " No compression works."
    return f" The smallest K that works for this cell is {least}.{'' if config.budgets else more}"


def _counts_all(budget: Budget | None) -> bool:
    return budget is not None and budget.scope == "total"


def _check_context(model: Model, task: Any, items: Sequence[Item]) -> None:
    """Prompt and trace must lie inside the positions the model was made for."""
    if model.context is None:
        return
    for item in items:
        trace = task.most_tokens(item) if hasattr(task, "most_tokens") else item.length - len(item.prompt)
        if len(item.prompt) + trace > model.context:
            raise ValueError(
                f"{task.name}, problem {item.id}: a prompt of {len(item.prompt)} and a trace of up to {trace} tokens "
                f"outgrow the {model.context} positions {model.name} was made for. Use shorter problems."
            )
