"""Traces on vLLM are those of the transformers engine, token by token, under every draw and schedule."""

from __future__ import annotations

from typing import Any

import pytest
from engines import differences, random_prompts

pytestmark = pytest.mark.vllm

LENGTH = 520
LENGTHS = (5, 77, 150, 300)  # K + r = 160: the last is longer, so an unprotected prompt of it is cut at round 0
SETTINGS: dict[str, dict[str, Any]] = {
    # who shares a draw
    "layer": {"draw": "layer"},
    "model": {"draw": "model"},
    "groups": {"groups": 2},
    "one-group": {"groups": 1},
    "unit-4": {"unit": 4},
    "unit-4-layer": {"unit": 4, "draw": "layer"},
    # whole blocks: a round edits the block table
    "blocks-32": {"unit": 32, "draw": "model"},
    "blocks-64": {"unit": 64, "draw": "model", "budget": 256, "buffer": 64},
    "blocks-32-window-64": {"unit": 32, "draw": "model", "window": 64},
    "blocks-32-no-window": {"unit": 32, "draw": "model", "window": 0},
    # schedules
    "buffer-1": {"buffer": 1},
    "buffer-7": {"budget": 101, "buffer": 7},
    "window-0": {"window": 0},
    "window-8": {"window": 8},
    "window-64": {"window": 64},
    "window-33-none": {"window": 33, "protect": "none"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str) -> None:
    keep = {"policy": "random", "budget": 128, "buffer": 32, "seed": 3, **SETTINGS[name]}
    assert differences("qwen3", keep, random_prompts(*LENGTHS), LENGTH) == [None] * len(LENGTHS)
