"""Everything that determines the results of a comparison, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .arms import Arm
from .engines import Backend
from .spelling import suggest
from .tasks import make_task


@dataclass(frozen=True)
class Primary:
    """A comparison that was declared before the run.

    Attributes:
        a: label of an arm.
        b: label of the arm it is compared with.
        level: compression (or K, where budgets were given) it is about; None: each.
    """

    a: str
    b: str
    level: float | None = None

    @classmethod
    def parse(cls, text: str, labels: list[str]) -> Primary:
        """Read ``A vs B`` or ``A vs B @2``.

        Raises:
            ValueError: it is neither, or an arm is not part of the comparison.
        """
        match = re.fullmatch(r"\s*(\S+)\s+vs\s+(\S+?)\s*(?:@\s*([0-9.]+)x?)?\s*", text)
        if match is None:
            raise ValueError(f"--primary is 'A vs B' or 'A vs B @2' with labels of arms, got {text!r}")
        a, b, level = match.groups()
        for label in (a, b):
            if label not in labels:
                raise ValueError(f"--primary {text!r}: there is no arm {label!r}: {suggest(label, labels)}")
        if a == b:
            raise ValueError(f"--primary {text!r} compares an arm with itself")
        return cls(a, b, None if level is None else float(level))

    @property
    def text(self) -> str:
        """As typed."""
        return f"{self.a} vs {self.b}" + ("" if self.level is None else f" @{self.level:g}")


@dataclass(frozen=True)
class Config:
    """A comparison: models x tasks x arms x budgets.

    Args:
        models: names that :func:`kvkeep.hf.load.load` takes.
        tasks: texts of tasks; become canonical.
        arms: the policies.
        compressions: K = mean length / compression; empty where budgets are given.
        budgets: values of K; empty where compressions are given.
        buffer: r, for every arm that has none of its own.
        problems: problems of each task.
        runs: repeated runs of each problem; they are averaged before anything else.
        seed: of the problem sets, the draws and the token choice.
        batch: rows of a batch at most.
        check: samples that are run again alone, to see that a batch changes nothing.
        primary: the declared comparisons.
        backend: engine, dtype, attention and device, the same for all arms.
        texts: keep every trace's text.

    Raises:
        ValueError: a value is out of range or the values do not fit together.
    """

    models: tuple[str, ...]
    tasks: tuple[str, ...]
    arms: tuple[Arm, ...]
    compressions: tuple[float, ...] = ()
    budgets: tuple[int, ...] = ()
    buffer: int = 64
    problems: int = 100
    runs: int = 1
    seed: int = 0
    batch: int = 50
    check: int = 4
    primary: tuple[Primary, ...] = ()
    backend: Backend = field(default_factory=Backend)
    texts: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(make_task(text).name for text in self.tasks))  # one text a task
        for name, least in (("problems", 2), ("runs", 1), ("batch", 1), ("buffer", 1), ("check", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.check > 16:
            raise ValueError(f"check must be at most 16 samples a run, got {self.check}")
        for what, values in (("model", self.models), ("task", self.tasks), ("primary comparison", self.primary)):
            if len(set(values)) != len(values):
                raise ValueError(f"a {what} is given twice")
        if not self.models or not self.tasks or not self.arms:
            raise ValueError("a comparison needs at least one model, one task and one policy")
        self._check_levels()

    def _check_levels(self) -> None:
        if bool(self.compressions) == bool(self.budgets) and any(arm.evicts for arm in self.arms):
            raise ValueError("give --compression (e.g. 2,4) or --budget (e.g. 256,512), one of the two")
        if bad := [k for k in self.budgets if k < 1]:
            raise ValueError(f"a budget is a whole number of entries, at least 1, got {bad[0]}")
        if any(not 1 <= c < float("inf") for c in self.compressions):
            raise ValueError(f"a compression is a number of at least 1, got {', '.join(map(str, self.compressions))}")
        if len(set(self.levels)) != len(self.levels):
            raise ValueError("a compression or budget is given twice")
        for primary in self.primary:
            if primary.level is not None and primary.level not in self.levels:
                known = ", ".join(f"{level:g}" for level in self.levels)
                raise ValueError(f"--primary {primary.text!r}: {primary.level:g} is not among {known}")
            if not any(arm.evicts for arm in self.arms if arm.label in (primary.a, primary.b)):
                raise ValueError(f"--primary {primary.text!r} compares two arms that evict nothing")

    @property
    def levels(self) -> tuple[float, ...]:
        """Compressions, or budgets where those were given."""
        return self.compressions or tuple(float(k) for k in self.budgets)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; comparisons as their text."""
        return {
            **asdict(self),
            "models": list(self.models),
            "tasks": list(self.tasks),
            "compressions": list(self.compressions),
            "budgets": list(self.budgets),
            "arms": [{**asdict(arm), "protect": arm.protect} for arm in self.arms],
            "primary": [primary.text for primary in self.primary],
        }


def first_difference(old: Any, new: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """The first place where two JSON values differ: its name, the old and the new value; None if they are equal."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*new, *(k for k in old if k not in new)]:
            place = f"{path}.{key}" if path else str(key)
            if found := first_difference(old.get(key), new.get(key), place):
                return found
        return None
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            if found := first_difference(a, b, f"{path}[{i}]"):
                return found
        return None
    return None if old == new else (path, old, new)
