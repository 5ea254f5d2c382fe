"""One object for Python, command line, vLLM configuration and results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .budget import Budget, Scope
from .layout import Protection
from .policies import Policy, make_policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .hf.cache import EvictCache


class Settings(BaseModel):
    """What to keep and how much of it: frozen, and the same after a trip through JSON.

    Args:
        policy: short name of a method (``kvkeep policies`` lists them).
        budget: K, entries per KV head and layer that remain after a round, prompt included.
            None only for ``full``.
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

    Raises:
        ValueError: (pydantic's ValidationError) for values that do not fit together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> Settings:
        policy = self.make_policy()
        budget = self.make_budget()
        self.protection  # noqa: B018 - refuses what it cannot read
        if budget is not None:
            policy.check(heads=0, every=budget.every, total=budget.total)
        return self

    @classmethod
    def of(cls, policy: str | Policy = "random", **values: Any) -> Settings:
        """Settings from flat keywords: whatever is not a field is an option of the policy.

        ``Settings.of("random", budget=2048, draw="layer")``
        """
        options = dict(values.pop("options", {}))
        if isinstance(policy, Policy):
            from dataclasses import asdict

            options = {**asdict(policy), **options}
            policy = policy.name
        options |= {k: values.pop(k) for k in list(values) if k not in cls.model_fields}
        return cls(policy=policy, options=options, **values)

    def make_policy(self) -> Policy:
        """The method these settings name."""
        return make_policy(self.policy, self.options)

    def make_budget(self) -> Budget | None:
        """The budget as configured, before a prompt; None for a policy that never evicts."""
        if not self.make_policy().evicts:
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
        return self.make_policy().default_protection if self.protect is None else self.protect

    def cache(self, model: PreTrainedModel, samples: list[int] | None = None) -> EvictCache:
        """A bounded cache for ``model``; ``reset()`` makes it ready for the next prompt."""
        from .hf.cache import EvictCache

        return EvictCache(model, self, samples)
