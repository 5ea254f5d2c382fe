"""Traces on vLLM are those of the transformers engine under every protection and rule, on other models too."""

from __future__ import annotations

from typing import Any

import pytest
from engines import differences, random_prompts

pytestmark = pytest.mark.vllm

LENGTH = 520
LENGTHS = (5, 77, 150, 300)  # K + r = 160: the last is longer, so an unprotected prompt of it is cut at round 0
SETTINGS: dict[str, dict[str, Any]] = {
    # prompts
    "trace": {"scope": "trace"},
    "align": {"align": 64},
    "half": {"protect": "prompt:0.5"},
    "none": {"protect": "none"},
    "sinks": {"protect": "sinks:4"},
    # other rules
    "recency": {"policy": "recency"},
    "recency-1": {"policy": "recency", "buffer": 1},
    "streaming": {"policy": "streaming"},
    "streaming-window-8": {"policy": "streaming", "window": 8},
    "streaming-gathered": {"policy": "streaming", "moving": "gather"},
    "gathered-window-64-none": {"window": 64, "protect": "none", "moving": "gather"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str) -> None:
    keep = {"policy": "random", "budget": 128, "buffer": 32, "seed": 3, **SETTINGS[name]}
    assert differences("qwen3", keep, random_prompts(*LENGTHS), LENGTH) == [None] * len(LENGTHS)


@pytest.mark.parametrize(
    ("kind", "keep", "options"),
    [
        ("gemma3", {"policy": "random", "protect": "none"}, {}),
        ("gemma3", {"policy": "streaming", "buffer": 8}, {"max_num_batched_tokens": 48}),
        ("llama", {"policy": "random", "unit": 64, "draw": "model", "budget": 256, "buffer": 64}, {"block_size": 64}),
        ("llama", {"policy": "random", "protect": "none", "admission": "reserve"}, {"max_num_batched_tokens": 48}),
        ("llama", {"policy": "recency", "budget": 120, "buffer": 24}, {"block_size": 128}),
    ],
    ids=["gemma3-none", "gemma3-streaming", "llama-blocks-64", "llama-none", "llama-recency"],
)
def test_settings_of_other_models(kind: str, keep: dict[str, Any], options: dict[str, Any]) -> None:
    keep = {"budget": 128, "buffer": 32, "seed": 3, **keep}
    assert differences(kind, keep, random_prompts(*LENGTHS), LENGTH, **options) == [None] * len(LENGTHS)
