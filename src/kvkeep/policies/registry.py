"""Short names of methods; packages add their own through the entry point group ``kvkeep.policies``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from .base import Policy
from .beaconkv import BeaconKV
from .expected import ExpectedAttention
from .full import Full
from .h2o import H2O
from .infokv import InfoKV
from .keys import KeyDiff, Knorm
from .lagkv import LagKV
from .mix import Mix
from .pyramidkv import PyramidKV
from .random import RandomAttention
from .recency import Recency, StreamingLLM
from .rkv import RKV
from .rpc import RPC
from .snapkv import SnapKV
from .tova import TOVA
from .triattention import TriAttention
from .vase import VaSE
from .vase_dkv import VaSEDKV

GROUP = "kvkeep.policies"
_BUILT_IN: tuple[type[Policy], ...] = (
    Full,
    RandomAttention,
    StreamingLLM,
    Recency,
    SnapKV,
    KeyDiff,
    Knorm,
    InfoKV,
    H2O,
    TOVA,
    PyramidKV,
    RPC,
    LagKV,
    TriAttention,
    ExpectedAttention,
    BeaconKV,
    RKV,
    VaSE,
    VaSEDKV,
    Mix,
)


_registered: dict[str, type[Policy]] = {p.name: p for p in _BUILT_IN}


def register(policy: type[Policy]) -> None:
    """Make a method known by its short name in this process.

    Raises:
        ValueError: another method has this name.
    """
    if not policy.name:
        raise ValueError(f"{policy.__name__} needs a short name: set its class attribute `name`")
    other = _registered.get(policy.name, policy)
    again = (other.__module__, other.__qualname__) == (policy.__module__, policy.__qualname__)  # a notebook cell
    if other is policy or again:
        _registered[policy.name] = policy
    else:
        raise ValueError(f"{policy.__name__} is called {policy.name!r} like {other.__name__}: give it another name")


@cache
def _load_entry_points() -> None:
    for entry in entry_points(group=GROUP):
        try:
            policy = entry.load()
        except Exception as error:  # somebody else's package: say whose, whatever went wrong
            raise ValueError(f"the policy {entry.name!r} ({entry.value}) cannot be loaded: {error}") from error
        if not (isinstance(policy, type) and issubclass(policy, Policy)):
            raise ValueError(f"entry point {entry.value} in group {GROUP} is not a kvkeep Policy class")
        register(policy)


def policies() -> dict[str, type[Policy]]:
    """Every known method by its short name, kvkeep's own first.

    Raises:
        ValueError: an installed method cannot be loaded, or two claim a name.
    """
    _load_entry_points()
    return dict(_registered)


def _find(name: str) -> type[Policy]:
    if name in _registered:  # kvkeep's own work even if somebody else's package is broken
        return _registered[name]
    known = policies()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ValueError(f"unknown policy {name!r}: {hint}known are {', '.join(known)}")
    return known[name]


def option_names(name: str) -> list[str]:
    """Names of a policy's options."""
    return [f.name for f in fields(_find(name))]


def make_policy(name: str, options: Mapping[str, Any] | None = None) -> Policy:
    """Build a policy from its short name and its options.

    Raises:
        ValueError: no such name (near names are suggested) or no such option.
    """
    allowed = option_names(name)
    for option in options or {}:
        if option not in allowed:
            takes = f"it takes {', '.join(allowed)}" if allowed else "it takes none"
            raise ValueError(f"policy {name!r} has no option {option!r}: {takes}")
    return _find(name)(**(options or {}))
