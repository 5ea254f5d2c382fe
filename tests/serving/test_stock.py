"""Where nothing is evicted, vLLM's own traces; in bfloat16, rounds add no error to vLLM's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import Tokens, _model, _Tokenizer, checkpoint, generate, params, random_prompts, serving

from kvkeep.hf.engine import HFEngine
from kvkeep.settings import Settings
from kvkeep.vllm import Serving
from kvkeep.vllm.timeline import Timeline

pytestmark = pytest.mark.vllm

LENGTH = 520
LENGTHS = (5, 40, 77, 150, 64, 277)
KEEP: dict[str, Any] = {"policy": "random", "budget": 128, "buffer": 32, "seed": 3}
LARGE: dict[str, Any] = {"policy": "random", "budget": 1024, "buffer": 32}  # more than any request has


def classes(llm: Any) -> list[type]:
    """What an engine in this process is made of."""
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    layers = runner.compilation_config.static_forward_context.values()
    groups = [group for groups in runner.attn_groups for group in groups]
    managers = core.scheduler.kv_cache_manager.coordinator.single_type_managers
    parts = [
        *(layer.impl for layer in layers), *(group.get_metadata_builder() for group in groups),
        *managers, *(manager.kv_cache_spec for manager in managers),
    ]  # fmt: skip
    return [type(part) for part in parts]


@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_a_budget_that_is_never_full_is_stock(kind: str) -> None:
    prompts = random_prompts(*LENGTHS)
    options = {"max_num_batched_tokens": 100}
    with serving(checkpoint(kind), None, **options) as llm:
        assert all(cls.__module__.startswith("vllm.") for cls in classes(llm))
        stock = generate(llm, prompts, LENGTH)
    with serving(checkpoint(kind), {"policy": "full"}, **options) as llm:
        assert all(cls.__module__.startswith("vllm.") for cls in classes(llm))
    for keep in (LARGE, {**LARGE, "draw": "model", "unit": 32, "admission": "reserve"}):
        with serving(checkpoint(kind), keep, **options) as llm:
            # Only what evicts is kvkeep's: sliding windows keep vLLM's builder, manager and spec.
            ours = {cls.__name__ for cls in classes(llm) if cls.__module__.startswith("kvkeep.")}
            assert {"KeepCPUImpl", "KeepCPUBuilder", "KeepManager", "KeepSpec"} == ours
            assert generate(llm, prompts, LENGTH) == stock


def logprobs(llm: Any, prompts: list[Tokens]) -> list[tuple[Tokens, torch.Tensor]]:
    """Greedy traces and the log-probabilities of their tokens, float32 [T]."""
    outputs = llm.generate(
        [{"prompt_token_ids": p} for p in prompts], [params(LENGTH, logprobs=0)] * len(prompts), use_tqdm=False
    )
    found = []
    for output in outputs:
        tokens = list(output.outputs[0].token_ids)
        steps = output.outputs[0].logprobs
        found.append((tokens, torch.tensor([s[t].logprob for s, t in zip(steps, tokens, strict=True)])))
    return found


def drift(keep: dict[str, Any] | None, prompts: list[Tokens]) -> tuple[float, float]:
    """Mean |log-probability on vLLM in bfloat16 - on transformers in float32|, of tokens before any round and after.

    The transformers engine is forced to take vLLM's traces. Tokens are cut in the same two parts without eviction.
    """
    with serving(checkpoint("qwen3"), keep, dtype="bfloat16") as llm:
        ours = logprobs(llm, prompts)
    weights = _model(checkpoint("qwen3"), "bfloat16").float()  # the same rounded weights: arithmetic is compared
    settings = Settings.of(**({"policy": "full"} if keep is None else {"scope": "grow", **keep}))
    engine = HFEngine(weights, _Tokenizer(), settings)  # type: ignore[arg-type]
    before, after = [], []
    for prompt, (tokens, values) in zip(prompts, ours, strict=True):
        forced = engine.force([prompt], [tokens], [0])[0]
        gap = (forced.logprobs - values).abs()
        timeline = Timeline.of(Serving.parse(KEEP), len(prompt))
        ran = torch.tensor([timeline.rounds(len(prompt) + t - 1) > 0 for t in range(LENGTH)])
        assert keep is None or torch.equal(ran, forced.rounds > 0)
        before.append(gap[~ran])
        after.append(gap[ran])
    return float(torch.cat(before).mean()), float(torch.cat(after).mean())


def test_rounds_add_no_error_in_bfloat16(record_property: Any) -> None:
    prompts = random_prompts(5, 30, 40, 50, 60, 70)
    stock = drift(None, prompts)
    kept = drift(KEEP, prompts)
    line = (
        f"mean |delta logprob|, bfloat16 against float32: before any round {kept[0]:.4f}, after {kept[1]:.4f}; "
        f"without eviction at the same tokens {stock[0]:.4f} and {stock[1]:.4f}"
    )
    print(line)
    record_property("bfloat16_drift", line)
    assert kept[0] == pytest.approx(stock[0])  # the same tokens, before any round
    assert kept[1] < 1.25 * max(kept[0], stock[1])
