"""What an operator asks of the vLLM engine: ``additional_config={"kvkeep": {...}}``.

Imports nothing of vLLM, so that the command line and its tests can read and refuse a configuration without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from functools import cached_property, lru_cache
from math import gcd
from typing import Any, Literal, get_args

from ..budget import Budget
from ..policies import Policy, policies
from ..settings import Settings
from ..signals import POSITIONS

#: Key of kvkeep's settings in vLLM's ``additional_config``.
KEY = "kvkeep"
#: Per-request parameter (``extra_args`` of SamplingParams, ``vllm_xargs`` over HTTP): the sample number of a request.
SEED = "kvkeep_seed"

Admission = Literal["grow", "reserve"]
Moving = Literal["in-place", "gather"]


class Refused(ValueError):
    """What kvkeep does not do on vLLM, refused before any token is emitted; the message says what to do instead."""


@dataclass(frozen=True)
class Serving:
    """Settings of the vLLM engine, with what only a server needs.

    Args:
        settings: policy, budget, buffer, protection and seed, as everywhere else.
        admission: "grow": a request takes blocks as it grows, up to its budget; "reserve": it takes all of them when
            it is admitted, and is then never preempted for memory (but for sliding-window layers beside).
        moving: "in-place": a round moves the newest entries onto the victims. "gather": it copies every kept entry to
            its rank, as engines do that compact; the same kept sets, for comparison only.
        max_prompt: tokens of the longest prompt that clients send; None: of any that the model takes. The pool must
            hold it, or the engine does not start.
        one_by_one: rounds run one request at a time instead of one batch a step; for comparison only.

    Raises:
        Refused: the vLLM engine cannot do this; says what to do.
        ValueError: a value is out of range.
    """

    settings: Settings
    admission: Admission = "grow"
    moving: Moving = "in-place"
    one_by_one: bool = False
    max_prompt: int | None = None

    def __post_init__(self) -> None:
        for name, kind in (("admission", Admission), ("moving", Moving)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}")
        if not isinstance(self.one_by_one, bool):
            raise ValueError(f"one_by_one must be true or false, got {self.one_by_one!r}")
        if self.max_prompt is not None and (type(self.max_prompt) is not int or self.max_prompt < 1):
            raise ValueError(f"max_prompt must be a whole number of at least 1, got {self.max_prompt!r}")
        if self.policy.evicts:
            self._check_policy()
            self._check_schedule()

    # ---- reading ----------------------------------------------------------------------------------

    @classmethod
    def parse(cls, values: Any) -> Serving:
        """Read ``additional_config["kvkeep"]``: fields of :class:`Settings`, options of the policy, and those above."""
        if not isinstance(values, Mapping):
            raise ValueError(
                f'additional_config["{KEY}"] must be an object such as {{"policy": "random", "budget": 2048}}, '
                f"got {values!r}"
            )
        own = {f.name for f in fields(cls)} - {"settings"}
        known = own | {f.name for f in fields(Settings)}
        for name in values:
            near = get_close_matches(str(name), own, n=1, cutoff=0.75)
            if near and name not in known:
                raise ValueError(f"there is no setting {name!r}: did you mean {near[0]}?")
        flat = {name: value for name, value in values.items() if name not in own}
        policy = flat.pop("policy", "random")
        if not isinstance(policy, str):
            raise ValueError(f"policy must be the short name of a method, got {policy!r}")
        if flat.get("scope") == "total":
            raise Refused(
                'scope="total" refuses prompts that do not fit, and vLLM cannot refuse one request: use scope="grow" '
                '(a long prompt brings its own budget, the default here) or scope="trace" (only the trace counts)'
            )
        flat.setdefault("scope", "grow")
        settings = Settings.of(policy, **flat)
        return cls(settings, **{name: value for name, value in values.items() if name in own})

    @classmethod
    def of(cls, additional_config: Any) -> Serving | None:
        """The settings in vLLM's ``additional_config``; None if kvkeep is not asked for, or asked to evict nothing."""
        if not isinstance(additional_config, Mapping) or KEY not in additional_config:
            return None
        serving = cls.parse(additional_config[KEY])
        return serving if serving.policy.evicts else None

    def to_json(self) -> str:
        """One line of JSON that :meth:`from_json` reads; equal for equal settings."""
        return json.dumps({**asdict(self), "settings": self.settings.to_dict()}, sort_keys=True)

    @staticmethod
    @lru_cache(maxsize=16)
    def from_json(text: str) -> Serving:
        """The settings :meth:`to_json` gave."""
        values = json.loads(text)
        return Serving(Settings.from_dict(values.pop("settings")), **values)

    # ---- what the settings stand for --------------------------------------------------------------

    @cached_property
    def policy(self) -> Policy:
        """The method."""
        return self.settings.make_policy()

    @cached_property
    def budget(self) -> Budget:
        """The budget before a prompt."""
        budget = self.settings.make_budget()
        assert budget is not None  # only asked of policies that evict
        return budget

    @cached_property
    def slots(self) -> int:
        """K + r: slots of a request whose prompt does not make its budget grow."""
        return self.budget.limit(0)

    @cached_property
    def whole_blocks(self) -> bool:
        """Whether rounds edit the block table and move no entry."""
        return self.policy.scope == "model" and self.policy.slots_per_unit > 1

    @cached_property
    def shares_prompts(self) -> bool:
        """Whether prompt blocks can be shared by the prefix cache: only what no round will ever write."""
        return self.settings.protection.share == 1

    # ---- block size -------------------------------------------------------------------------------

    def check_block_size(self, size: int, supported: int = 1) -> None:
        """Refuse a block size that whole-block draws cannot use.

        Args:
            size: slots of a block.
            supported: the attention kernels take multiples of this.
        """
        unit = self.policy.slots_per_unit
        if self.whole_blocks and unit % size:
            fitting = self.best_block_size(supported, unit)
            advice = (
                f"pass --block-size {fitting}" if unit % fitting == 0 else f"use a multiple of {supported} as the unit"
            )
            raise Refused(
                f"unit={unit} with draw='model' evicts whole blocks, and blocks of {size} slots do not divide it: "
                f"{advice}"
            )

    def best_block_size(self, supported: int, most: int = 1 << 10) -> int:
        """The largest block size that wastes no slot of K + r, so that all of a request's blocks are full.

        Args:
            supported: the attention kernels take multiples of this.
            most: largest size to choose.

        Returns:
            The largest multiple of ``supported`` that divides gcd(K - r, r) and, with whole blocks, the unit;
            ``supported`` itself if there is none.
        """
        common = gcd(self.budget.total - self.budget.every, self.budget.every)
        if self.whole_blocks:
            common = gcd(common, self.policy.slots_per_unit)
        sizes = [s for s in range(supported, min(most, common) + 1, supported) if common % s == 0]
        return max(sizes, default=supported)

    # ---- refusals ---------------------------------------------------------------------------------

    def _check_policy(self) -> None:
        if not runs_here(self.policy):
            able = ", ".join(runnable())
            raise Refused(
                f"policy {self.policy.name!r} looks at what the vLLM engine does not show yet (keys, queries, ...): "
                f"use one of {able}, or run it with transformers (kvkeep.evict)"
            )
        if self.policy.slots_per_unit > 1 and self.settings.protection.share < 1:
            raise Refused(
                f"unit={self.policy.slots_per_unit} cannot cut a prompt that is not protected, and vLLM cannot refuse "
                "one request: use protect='prompt' or unit=1"
            )

    def _check_schedule(self) -> None:
        settings = self.settings
        if settings.prefill_keep is not None:
            raise Refused("prefill_keep compresses a context once, which the vLLM engine does not do: leave it out")
        if settings.growth is not None:
            raise Refused(
                f"growth={settings.growth} lets the budget grow without end, and a server's memory is fixed: "
                "use growth=None"
            )
        if settings.protection.pins:
            raise Refused(
                f"protect={settings.protect_text!r} pins positions of one known text, and a server sees many: "
                "use prompt, prompt:0.5, sinks:4 or none"
            )
        if settings.track_positions:
            raise Refused(
                "track_positions is not kept here: draws are pure functions, and the transformers engine tells "
                "the kept positions of the same settings (EvictCache.kept_positions); leave it out"
            )


def runs_here(policy: Policy) -> bool:
    """Whether a policy's rounds can run on vLLM: it needs nothing but positions, and layers keep equally many."""
    return policy.content_free and policy.signals <= {POSITIONS} and not policy.splits


def runnable() -> list[str]:
    """Short names of the methods that run on vLLM."""
    names = []
    for name, policy in policies().items():
        try:
            made = policy()
        except (TypeError, ValueError):  # a method that has no defaults, such as one that needs a calibration file
            continue
        if not made.evicts or runs_here(made):
            names.append(name)
    return names
