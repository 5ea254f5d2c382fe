"""Traces stay those of the transformers engine when vLLM spreads its work over processes, or compiles the model."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from engines import Tokens, checkpoint, first_difference, generate, random_prompts, reference, serving

pytestmark = pytest.mark.vllm

KEEP: dict[str, Any] = {"policy": "random", "budget": 128, "buffer": 32, "seed": 3}
LENGTH = 520
LENGTHS = (5, 150, 277)
SAME = [None] * len(LENGTHS)


@cache
def expected(path: str) -> list[Tokens]:
    return reference(path, KEEP, random_prompts(*LENGTHS), LENGTH)


def test_engine_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with serving(checkpoint("qwen3"), KEEP) as llm:
        ours = generate(llm, random_prompts(*LENGTHS), LENGTH)
    assert first_difference(ours, expected(checkpoint("qwen3"))) == SAME


@pytest.mark.parametrize("heads", [2, 1])
def test_tensor_parallel(heads: int, tmp_path: Path) -> None:
    """Two workers; with one KV head both hold it, and must draw alike."""
    path = checkpoint("qwen3")
    if heads == 1:
        config = transformers.AutoConfig.from_pretrained(path)
        config.num_key_value_heads = 1
        path = str(tmp_path / "one-head")
        transformers.set_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    with serving(path, KEEP, tensor_parallel_size=2, distributed_executor_backend="mp") as llm:
        ours = generate(llm, random_prompts(*LENGTHS), LENGTH)
    assert first_difference(ours, expected(path)) == SAME


def test_compiled() -> None:
    with serving(checkpoint("qwen3"), KEEP, enforce_eager=False) as llm:
        ours = generate(llm, random_prompts(*LENGTHS), LENGTH)
    assert first_difference(ours, expected(checkpoint("qwen3"))) == SAME
