"""Short names of methods; packages add their own through the entry point group ``kvkeep.policies``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from .base import Policy
from .full import Full
from .random import RandomAttention
from .recency import Recency, StreamingLLM

GROUP = "kvkeep.policies"
_BUILT_IN: tuple[type[Policy], ...] = (Full, RandomAttention, StreamingLLM, Recency)


@cache
def policies() -> dict[str, type[Policy]]:
    """Every known method by its short name, kvkeep's own first.

    Raises:
        ValueError: two methods claim a name, or an entry point does not give a policy class.
    """
    known = {p.name: p for p in _BUILT_IN}
    for entry in entry_points(group=GROUP):
        policy = entry.load()
        if not (isinstance(policy, type) and issubclass(policy, Policy)):
            raise ValueError(f"entry point {entry.value} in group {GROUP} is not a kvkeep Policy class")
        if policy.name in known:
            raise ValueError(
                f"two policies are called {policy.name!r}: {known[policy.name].__name__} and {entry.value}"
            )
        known[policy.name] = policy
    return known


def make_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Build a policy from its short name and its options.

    Raises:
        ValueError: no such name (near names are suggested) or no such option.
    """
    known = policies()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"unknown policy {name!r}: {hint}known are {', '.join(known)}")
    policy = known[name]
    allowed = [f.name for f in fields(policy)]
    for option in options or {}:
        if option not in allowed:
            takes = f"it takes {', '.join(allowed)}" if allowed else "it takes none"
            raise ValueError(f"policy {name!r} has no option {option!r}: {takes}")
    return policy(**(options or {}))
