"""Adapters (LoRA) under eviction, against the transformers engine with merged weights and the same kept sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engines import checkpoint, first_difference, generate, params, random_prompts, reference, serving
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.vllm

RANK, ALPHA = 8, 16
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def adapter(model: str, folder: Path) -> tuple[str, str]:
    """A random adapter in peft's format, and the checkpoint that has it merged into its weights."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator, tensors = torch.Generator().manual_seed(5), {}
    for name, module in base.named_modules():
        if name.rpartition(".")[2] in PROJECTIONS:
            down = torch.randn(RANK, module.in_features, generator=generator) * 0.1
            up = torch.randn(module.out_features, RANK, generator=generator) * 0.1
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
            module.weight.data += ALPHA / RANK * (up @ down)
    made, merged = folder / "adapter", folder / "merged"
    made.mkdir()
    save_file(tensors, made / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none",
              "target_modules": list(PROJECTIONS), "base_model_name_or_path": model}  # fmt: skip
    (made / "adapter_config.json").write_text(json.dumps(config))
    base.save_pretrained(merged)
    return str(made), str(merged)


def test_adapters(tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    keep = {"policy": "random", "budget": 128, "buffer": 32, "seed": 3}
    model = checkpoint("qwen3")
    made, merged = adapter(model, tmp_path)
    prompts = random_prompts(5, 40, 77, 150)
    with serving(model, keep, enable_lora=True, max_lora_rank=RANK) as llm:
        # One after the other: in a mixed batch vLLM 0.32 on the CPU adapts requests that name no adapter, too.
        plain = generate(llm, prompts, 400)
        inputs = [{"prompt_token_ids": p} for p in prompts]
        outputs = llm.generate(
            inputs, [params(400)] * len(prompts), use_tqdm=False, lora_request=LoRARequest("one", 1, made)
        )
        adapted = [list(o.outputs[0].token_ids) for o in outputs]
    assert first_difference(plain, reference(model, keep, prompts, 400)) == [None] * 4
    assert first_difference(adapted, reference(merged, keep, prompts, 400)) == [None] * 4
    assert None not in first_difference(plain, adapted)
