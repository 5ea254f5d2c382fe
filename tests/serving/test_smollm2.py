"""A real model: SmolLM2 on vLLM takes the traces of the transformers engine, token by token."""

from __future__ import annotations

from typing import Any

import pytest
from engines import first_difference, generate, reference, serving

pytestmark = [pytest.mark.vllm, pytest.mark.smollm2, pytest.mark.slow]

KEEP: dict[str, Any] = {"policy": "random", "budget": 192, "buffer": 32, "seed": 1}
TEXTS = (
    "A farmer has 17 sheep, buys 5 more every week for six weeks and sells a third of them at the end. "
    "How many are left? Think step by step and check each step.",
    "Write a long story about a lighthouse keeper who finds a map.",
)


def test_smollm2() -> None:
    from transformers import AutoTokenizer

    from kvkeep.hf.load import encode_prompt, smollm2_folder

    path = str(smollm2_folder())
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [encode_prompt(tokenizer, text) for text in TEXTS]
    with serving(path, KEEP, max_model_len=2048) as llm:
        # The transformers engine never takes the end token; vLLM would, and go on.
        ours = generate(llm, prompts, 520, logit_bias={tokenizer.eos_token_id: -100.0})
    print([tokenizer.decode(trace)[-200:] for trace in ours])
    assert first_difference(ours, reference(path, KEEP, prompts, 520)) == [None] * len(prompts)
