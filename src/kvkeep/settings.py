"""One object for Python, command line, vLLM configuration and results."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .budget import Budget, Scope
from .policies import Policy, make_policy, option_names, policies, register
from .protection import Protection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .hf.cache import EvictCache


@dataclass(frozen=True)
class Settings:
    """What to keep and how much of it: frozen, and the same after a trip through JSON.

    A plain dataclass, so that the engine needs nothing beside torch and transformers.

    Args:
        policy: short name of a method (``kvkeep policies`` lists them).
        budget: K, entries per KV head and layer that remain after a round, prompt included.
            None only for ``full``, which ignores it.
        buffer: r, tokens cached between two rounds; sets ``every`` and, unless given, ``window``.
        window: w, the newest entries that are always kept.
        growth: None, or c: K grows by r / c a round.
        scope: "total" refuses a prompt that does not fit, "trace" counts only the trace, "grow" lets
            a long prompt bring its own budget.
        align: round budgets that depend on the prompt up to a multiple (block size of a paged engine).
        protect: what outranks every score; None takes the policy's default.
        seed: the run's seed; draws are a pure function of it.
        track_positions: keep the position of every entry (4 bytes an entry of a head), so that kept
            positions can be read without replaying the rounds.
        options: the policy's own options, e.g. ``{"draw": "layer"}``.
        prefill_keep: share of the context that is kept after its prefill, once; None keeps all of it. Rounds follow
            only if there is a budget too. The context is the whole prompt, or what ``context_length=`` says.

    Raises:
        ValueError: a value is out of range or the values do not fit together.
    """

    policy: str = "random"
    budget: int | None = None
    buffer: int = 64
    window: int | None = None
    growth: float | None = None
    scope: Scope = "total"
    align: int = 1
    protect: str | None = None
    seed: int = 0
    track_positions: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    prefill_keep: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed must be a whole number of 64 bits, got {self.seed!r}")
        if self.protect is not None and not isinstance(self.protect, str):
            raise ValueError(f"protect is a text such as 'prompt' or 'sinks:4', got {self.protect!r}")
        self._check_prefill()
        policy, budget = self.make_policy(), self.make_budget()
        if self.protection.pins and policy.slots_per_unit > 1:
            raise ValueError(f"pins protect single tokens, unit={policy.slots_per_unit} evicts several: use unit=1")
        if budget is not None:
            policy.check(heads=0, budget=budget)  # the model's heads are checked when it is known

    def _check_prefill(self) -> None:
        keep = self.prefill_keep
        if keep is None:
            return
        if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
            raise ValueError(f"prefill_keep is the share of the context that stays, above 0 and up to 1, got {keep!r}")
        if not self.make_policy().evicts:
            raise ValueError(f"policy {self.policy!r} evicts nothing: leave out prefill_keep")
        if self.make_policy().slots_per_unit > 1:
            raise ValueError("prefill_keep compresses to any number of entries: use unit=1")
        if self.protection.share:
            raise ValueError(
                f"protect={self.protect!r} keeps the prompt that prefill_keep is to compress: use none or sinks:4"
            )

    @classmethod
    def of(cls, policy: str | Policy = "random", **values: Any) -> Settings:
        """Settings from flat keywords: whatever is not a field is an option of the policy.

        ``Settings.of("random", budget=2048, draw="layer")``
        """
        options = dict(values.pop("options", {}))
        if isinstance(policy, Policy):
            register(type(policy))
            options = {**asdict(policy), **options}
            policy = policy.name
        known = [f.name for f in fields(cls)]
        for name in [k for k in values if k not in known]:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
            if near and name not in option_names(policy):
                raise ValueError(f"there is no setting {name!r}: did you mean {near[0]}?")
            options[name] = values.pop(name)
        return cls(policy=policy, options=options, **values)

    @classmethod
    def published(cls, policy: str, budget: int, **values: Any) -> Settings:
        """Settings with the schedule, protection and options of the policy's own paper; ``values`` outrank them.

        Raises:
            ValueError: the paper's schedule does not fit the budget.
        """
        options = {**policies()[policy].published_options, **values.pop("options", {})}
        made = make_policy(policy, options)
        if not made.evicts:
            return cls(policy, options=options, seed=values.get("seed", 0))
        given = {"budget": budget, **made.schedule(budget), "protect": made.published_protection, **values}
        return cls(policy=policy, options=options, **given)

    # ---- JSON -----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """The settings :meth:`to_dict` gave; missing fields take their defaults.

        Raises:
            ValueError: a name is not a field (near names are suggested).
        """
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=2)
                hint = f"did you mean {' or '.join(near)}? " if near else ""
                raise ValueError(f"settings have no field {name!r}: {hint}fields are {', '.join(known)}")
        return cls(**values)

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The settings :meth:`to_json` gave."""
        return cls.from_dict(json.loads(text))

    # ---- what the settings stand for --------------------------------------------------------------

    def make_policy(self) -> Policy:
        """The method these settings name."""
        return make_policy(self.policy, self.options)

    def make_budget(self) -> Budget | None:
        """The budget as configured, before a prompt; None for a policy that never evicts."""
        if not self.make_policy().evicts or (self.budget is None and self.prefill_keep is not None):
            return None
        if self.budget is None:
            raise ValueError(f"policy {self.policy!r} needs a budget: the entries each KV head may keep, e.g. 2048")
        window = -1 if self.window is None else self.window
        return Budget(self.budget, self.buffer, window, self.growth, self.scope, self.align)

    @property
    def protection(self) -> Protection:
        """What is protected, read from ``protect`` or the policy's default."""
        return Protection.parse(self.protect_text)

    @property
    def protect_text(self) -> str:
        """The protection in the notation of the command line."""
        if self.protect is not None:
            return self.protect
        default = self.make_policy().default_protection
        return "none" if self.prefill_keep is not None and Protection.parse(default).share else default

    @property
    def prefill_window(self) -> int:
        """Newest entries of the context that stay when it is compressed."""
        budget = self.make_budget()
        if budget is not None:
            return budget.window
        return self.make_policy().prefill_window if self.window is None else self.window

    def cache(self, model: PreTrainedModel, samples: Sequence[int] | None = None) -> EvictCache:
        """A bounded cache for ``model``; ``reset()`` makes it ready for the next prompt."""
        from .hf.cache import EvictCache

        return EvictCache(model, self, samples)
