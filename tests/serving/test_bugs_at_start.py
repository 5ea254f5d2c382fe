"""Bugs of other ports, as in ``test_bugs.py``: those that are about how engines start, or about several of them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engines import checkpoint, first_difference, generate, random_prompts, reference, serving

pytestmark = pytest.mark.vllm

KEEP: dict[str, Any] = {"policy": "random", "budget": 64, "buffer": 16, "seed": 3}
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 97, "max_model_len": 1024}


def managers(llm: Any) -> list[Any]:
    return list(llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.coordinator.single_type_managers)


def runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def layers(llm: Any) -> dict[str, Any]:
    return dict(llm.llm_engine.vllm_config.compilation_config.static_forward_context)


def expected(prompts: list[list[int]], length: int, keep: dict[str, Any] | None = KEEP) -> list[list[int]]:
    return reference(checkpoint("qwen3"), keep, prompts, length)


def tap_in(llm: Any) -> Any:
    from kvkeep.vllm.tap import RequestTap

    processors = runner(llm).input_batch.logitsprocs.all
    return next(p for p in processors if isinstance(p, RequestTap))


@pytest.mark.parametrize("keep", [None, {"policy": "full"}], ids=["not asked", "full"])
def test_rkv_1_nothing_is_built_when_disabled(keep: dict[str, Any] | None) -> None:
    """The compressor was built even when it was off. Also TriAttention: active merely because it is installed."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    with serving(checkpoint("qwen3"), keep, **SMALL) as llm:
        assert [type(m) for m in managers(llm)] == [FullAttentionManager]
        assert [type(g.get_metadata_builder()) for g in runner(llm).attn_groups[0]] == [CPUAttentionMetadataBuilder]
        assert {type(layer.impl) for layer in layers(llm).values()} == {CPUAttentionBackendImpl}
        prompts = random_prompts(30, 100)
        assert first_difference(generate(llm, prompts, 120), expected(prompts, 120, None)) == [None, None]
        assert tap_in(llm).rows == []


def test_rkv_10_async_scheduling() -> None:
    """The number of dropped entries was one step old, so a token overwrote a survivor.

    vLLM switches asynchronous scheduling off on CPUs, whatever is asked: ``test_bugs.py`` tests that nothing depends on
    more than positions.
    """
    prompts = random_prompts(20, 50)
    with serving(checkpoint("qwen3"), KEEP, **SMALL, async_scheduling=True) as llm:
        assert not llm.llm_engine.vllm_config.scheduler_config.async_scheduling
        assert first_difference(generate(llm, prompts, 100), expected(prompts, 100)) == [None, None]


def test_triattention_what_is_missing_is_found_at_the_start(tmp_path: Path) -> None:
    """A missing statistics file was found when the first request crossed the threshold, and killed the engine."""
    missing = tmp_path / "none.safetensors"
    scored = {"policy": "triattention", "calibration": str(missing), "budget": 64}
    with pytest.raises(ValueError, match=f"no calibration {missing}"), serving(checkpoint("qwen3"), scored):
        pass
    with (
        pytest.raises(ValueError, match="budget 8 is not larger than the buffer 16"),
        serving(checkpoint("qwen3"), {**KEEP, "budget": 8}),
    ):
        pass


def test_triattention_sliding_layers_are_left_alone() -> None:
    """Every group of layers was compacted alike."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    from kvkeep.vllm.manager import KeepManager

    prompts = random_prompts(10, 100)
    with serving(checkpoint("gemma3"), KEEP, **SMALL) as llm:
        assert {type(m) for m in managers(llm)} == {KeepManager, SlidingWindowManager}
        bounded = [name.split(".")[2] for name, layer in layers(llm).items() if getattr(layer, "kvkeep", False)]
        assert bounded == ["2", "5"]
        ours = generate(llm, prompts, 150)
    assert first_difference(ours, reference(checkpoint("gemma3"), KEEP, prompts, 150)) == [None, None]


def test_triattention_blocks_that_change_hands() -> None:
    """What was computed from a block table was remembered by its address, and found again for another table."""
    prompts = [random_prompts(*[20 + i] * 2, seed=i) for i in range(6)]
    options: dict[str, Any] = {"num_gpu_blocks_override": 7, "max_model_len": 192, "enable_prefix_caching": False}
    with serving(checkpoint("qwen3"), KEEP, **options) as llm:
        for pair in prompts:  # all take the same six blocks
            assert first_difference(generate(llm, pair, 100), expected(pair, 100)) == [None, None]


@pytest.mark.parametrize("order", [(KEEP, None), (None, KEEP), (KEEP, {**KEEP, "budget": 96, "seed": 4})], ids=str)
def test_two_engines_in_one_process(order: tuple[dict[str, Any] | None, ...]) -> None:
    """Patches of the process made one engine's settings the other's."""
    prompts = random_prompts(30, 90)
    with ExitStack() as stack:
        llms = [stack.enter_context(serving(checkpoint("qwen3"), keep, **SMALL)) for keep in order]
        for _ in range(2):  # each after the other
            for llm, keep in zip(llms, order, strict=True):
                assert first_difference(generate(llm, prompts, 100), expected(prompts, 100, keep)) == [None, None]
