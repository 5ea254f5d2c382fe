"""Checks of options that several methods share."""

from __future__ import annotations

from math import inf
from typing import Any


def whole(policy: Any, name: str, least: int) -> None:
    """Refuse an option that is not a whole number of at least ``least``."""
    value = getattr(policy, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def odd(policy: Any, name: str) -> None:
    """Refuse an option that is not an odd number of at least 1."""
    whole(policy, name, 1)
    if getattr(policy, name) % 2 == 0:
        raise ValueError(f"{name} must be odd, got {getattr(policy, name)}")


def choice(policy: Any, name: str, *allowed: str) -> None:
    """Refuse an option that is none of ``allowed``."""
    value = getattr(policy, name)
    if value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(allowed)}, got {value!r}")


def fraction(policy: Any, name: str) -> None:
    """Refuse an option that is not a number from 0 to 1."""
    value = getattr(policy, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number from 0 to 1, got {value!r}")


def number(policy: Any, name: str, least: float) -> None:
    """Refuse an option that is not a finite number of at least ``least``."""
    value = getattr(policy, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < inf:
        raise ValueError(f"{name} must be a number of at least {least}, got {value!r}")


def truth(policy: Any, name: str) -> None:
    """Refuse an option that is neither true nor false."""
    if not isinstance(getattr(policy, name), bool):
        raise ValueError(f"{name} must be true or false, got {getattr(policy, name)!r}")
