"""Arms of a comparison: a policy with its options and protection, but without a budget."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..policies import Policy, make_policy, option_names
from ..settings import Settings
from .spelling import parse, spell, suggest

#: Settings an arm may set; the budget is the comparison's, the same for every arm.
FIELDS = ("protect", "buffer", "window", "scope", "seed", "growth")
#: Those among them that change how many entries an arm may hold; no label hides them.
COSTS = ("buffer", "window", "scope", "growth")


@dataclass(frozen=True)
class Arm:
    """One policy of a comparison.

    Attributes:
        label: names the arm in tables and in ``--primary``; settings that change what it costs are always in it.
        policy: short name of the policy.
        values: fields of :class:`~kvkeep.settings.Settings` that were given.
        options: options of the policy that were given, and those that are always spelled out.
        published: the arm runs its paper's own schedule and protection, not those common to all arms.
    """

    label: str
    policy: str
    values: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    published: bool = False

    @classmethod
    def parse(cls, text: str) -> Arm:
        """Read ``random:protect=none,draw=model,label=...``, or ``rkv:published=true`` for its paper's own settings.

        Raises:
            ValueError: unknown policy, key or value; near names are suggested.
        """
        name, given = parse(text, "arm")
        label = given.pop("label", None)
        if label is not None and re.search(r"\s", str(label)):
            raise ValueError(f"arm {text!r}: a label has no spaces, since --primary names arms by it")
        allowed = option_names(name)
        published = given.get("published", False)
        if not isinstance(published, bool):
            raise ValueError(f"arm {text!r}: published is true or false, got {published!r}")
        values = {key: value for key, value in given.items() if key in FIELDS}
        options = {key: value for key, value in given.items() if key not in (*FIELDS, "published")}
        for key in options:
            if key == "budget":
                raise ValueError(f"arm {text!r}: the budget is the same for all arms; pass it as --budget")
            if key not in allowed:
                raise ValueError(
                    f"arm {text!r} has no option {key!r}: {suggest(key, [*allowed, *FIELDS, 'label', 'published'])}"
                )
        always = _always(make_policy(name, options))
        options, given = {**always, **options}, {**always, **given}
        costs = {key: value for key, value in values.items() if key in COSTS}
        if published:
            costs["published"] = True
        shown = spell(name, given) if label is None else spell(str(label), costs)
        made = cls(shown, name, values, options, published)
        if not make_policy(name, options).evicts and set(values) - {"seed"}:
            raise ValueError(f"arm {text!r}: {name} evicts nothing, so it takes no {', '.join(values)}")
        made.settings(2**40, None, 0)  # refuse bad values now; whether a real budget fits is the cells' business
        return made

    @property
    def evicts(self) -> bool:
        """False for the full cache."""
        return make_policy(self.policy, self.options).evicts

    @property
    def text(self) -> str:
        """Policy and options, without protection and other settings."""
        return spell(self.policy, self.options)

    @property
    def protect(self) -> str:
        """The protection, the policy's default if none was given."""
        policy = make_policy(self.policy, self.options)
        default = policy.published_protection if self.published else policy.default_protection
        return str(self.values.get("protect") or default)

    @property
    def schedule(self) -> str:
        """``published`` where the arm has its paper's own schedule; ``common`` also where the paper has none."""
        own = self.published and make_policy(self.policy, self.options).schedule(2**20)
        return "published" if own else "common"

    def settings(self, budget: int | None, buffer: int | None, seed: int) -> Settings:
        """Settings of a cell.

        Args:
            budget: K; ignored by a policy that never evicts.
            buffer: r, unless the arm has its own; None: the default, or less where the arm's options need it.
            seed: the run's seed, unless the arm has its own.

        Raises:
            ValueError: the values do not fit together.
        """
        values: dict[str, Any] = {"seed": seed, **self.values}
        if not self.evicts:
            return Settings(self.policy, seed=values["seed"], options=dict(self.options))
        if buffer is None:
            unit = self.options.get("unit", 1)
            buffer = unit if isinstance(unit, int) and unit > 0 else 1
            budget = (2**40 // buffer) * buffer
        if self.published:
            assert budget is not None
            if "buffer" not in make_policy(self.policy, self.options).schedule(budget):
                values = {"buffer": buffer, **values}  # the paper has none: the one common to all arms
            return Settings.published(self.policy, budget, **values, options=dict(self.options))
        return Settings(self.policy, **{"budget": budget, "buffer": buffer, **values}, options=dict(self.options))


def _always(policy: Policy) -> dict[str, Any]:
    """Options that are spelled out even at their default."""
    return {name: getattr(policy, name) for name in policy.shown}


def parse_arms(texts: Sequence[str]) -> tuple[Arm, ...]:
    """Arms with different labels.

    Raises:
        ValueError: an arm cannot be read, two share a label, or there is none.
    """
    arms = tuple(Arm.parse(text) for text in texts)
    if not arms:
        raise ValueError("a comparison needs at least one --policy, e.g. --policy random")
    seen: set[str] = set()
    for arm in arms:
        if arm.label in seen:
            raise ValueError(f"two arms are called {arm.label!r}: give one of them another label=")
        seen.add(arm.label)
    return arms
