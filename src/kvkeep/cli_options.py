"""What several commands read alike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def read_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Options of a policy from ``name=value``; a value is JSON if it reads as such, else text."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--option takes name=value, got {pair!r}")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found
