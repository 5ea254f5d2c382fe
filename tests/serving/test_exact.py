"""Traces on vLLM are those of the transformers engine, token by token."""

from __future__ import annotations

import pytest
from engines import checkpoint, first_difference, generate, random_prompts, reference, serving

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3"])
def test_models(kind: str) -> None:
    keep = {"policy": "random", "budget": 128, "buffer": 32, "seed": 3}
    prompts = random_prompts(5, 40, 77, 150, 64)
    with serving(checkpoint(kind), keep) as llm:
        ours = generate(llm, prompts, 520)
    assert first_difference(ours, reference(checkpoint(kind), keep, prompts, 520)) == [None] * 5
