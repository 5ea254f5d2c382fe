"""Bugs that other ports of KV eviction to vLLM published or have, each as a test that would find it here.

The R-KV patch's list is numbered as its authors do; the rest are holes of TriAttention's plug-in. Where another file
tests the same thing better, it is named:

- LoRA: ``test_lora.py``; speculative decoding, quantised caches, connectors, context parallelism, dual batch overlap,
  other vLLM versions, a merged hybrid cache: ``test_refusals.py``; tensor parallel ranks on real processes:
  ``test_exact_processes.py``; asynchronous scheduling and several engines: ``test_bugs_at_start.py``
- full CUDA graphs that skip what attention does in Python: ``test_gpu_code.py`` (graphs hold single tokens only, and
  their rounds run before the forward)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engines import checkpoint, first_difference, generate, params, random_prompts, reference, serving

from kvkeep.bench.storm import Ask, storm
from kvkeep.plan import plan
from kvkeep.settings import Settings
from kvkeep.vllm import Refused, Serving
from kvkeep.vllm.config import runnable
from kvkeep.vllm.layouts import layout_of
from kvkeep.vllm.requests import Tracked
from kvkeep.vllm.rounds import Rounds
from kvkeep.vllm.steps import Rows
from kvkeep.vllm.timeline import Timeline
from kvkeep.vllm.views import Heads, look

KEEP: dict[str, Any] = {"policy": "random", "budget": 64, "buffer": 16, "seed": 3}
CAP = 3  # blocks of 32 slots that hold K + r = 80


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """Few tokens a step, so that prompts come in chunks and a batch has more entries than a step has tokens."""
    with serving(checkpoint("qwen3"), KEEP, max_num_batched_tokens=48, num_gpu_blocks_override=129) as llm:
        yield llm


@pytest.fixture
def clean(engine: Any) -> Any:
    """The engine with nothing cached."""
    assert engine.reset_prefix_cache()
    return engine


def scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def managers(llm: Any) -> list[Any]:
    return list(scheduler(llm).kv_cache_manager.coordinator.single_type_managers)


def expected(prompts: list[list[int]], length: int, keep: dict[str, Any] | None = KEEP) -> list[list[int]]:
    return reference(checkpoint("qwen3"), keep, prompts, length)


def blocks_of(llm: Any, prompts: list[list[int]], length: int) -> list[int]:
    """Most blocks that requests hold together, step by step."""
    for i, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, params(length))
    held = []
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        held.append(sum(len(blocks) for blocks in managers(llm)[0].req_to_blocks.values()))
    return held


# ---- R-KV's list --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vec", "triton"])
def test_rkv_2_caches_that_are_not_contiguous(name: str) -> None:
    """``.view`` failed on a cache that was one half of an unbound tensor."""
    both = torch.arange(2 * 5 * 2 * 32 * 16, dtype=torch.float32).view(5, 2, 2, 32, 16)
    cache, other = both.unbind(1)
    before, layout = both.clone(), layout_of(name)
    heads, src = torch.tensor([1]), (torch.tensor([4]), torch.tensor([7]))
    dst = (torch.tensor([0]), torch.tensor([31]))
    entry = layout.read(cache, heads, src)
    layout.move(cache, heads, src, dst)
    assert all(torch.equal(a, b) for a, b in zip(layout.read(cache, heads, dst), entry, strict=True))
    assert torch.equal(other, before[:, 1])
    assert int((cache != before[:, 0]).sum()) == 16  # one entry: eight words of key and of value each


@pytest.mark.vllm
def test_rkv_3_no_silent_nothing_on_the_second_model_runner(engine: Any) -> None:
    """On model runner V2 nothing was evicted, and nothing said so. An install that is not asked for must load there."""
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.sample.logits_processor import loader

    from kvkeep.vllm.tap import RequestTap

    assert RequestTap in loader._load_v2_logitsprocs_plugins()
    state = object()  # the second runner's only other argument
    inert = RequestTap(VllmConfig(), state)
    assert not inert.add_request(0, params(1))
    logits = torch.randn(2, 5)
    assert inert.apply(logits, None) is logits
    with pytest.raises(Refused, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        RequestTap(engine.llm_engine.vllm_config, state)


@pytest.mark.vllm
def test_rkv_4_more_entries_in_the_batch_than_tokens_in_a_step(clean: Any) -> None:
    """Scratch memory was sized by the tokens of a step (48 here) and overflowed."""
    prompts = random_prompts(*[40] * 12, seed=4)  # 12 x 80 entries
    assert first_difference(generate(clean, prompts, 90), expected(prompts, 90)) == [None] * 12


@pytest.mark.vllm
def test_rkv_5_no_round_between_the_chunks_of_a_prompt(clean: Any) -> None:
    """Compaction ran while a prompt came in chunks. Also TriAttention: a chunk overshot the budget."""
    prompts = random_prompts(300, 61, 79, 80, 81)
    assert first_difference(generate(clean, prompts, 70), expected(prompts, 70)) == [None] * 5
    clean.reset_prefix_cache()
    largest = Timeline.of(Serving.parse(KEEP), 300).slots
    assert max(blocks_of(clean, prompts[:1], 70)) == -(-largest // 32)


@pytest.mark.vllm
def test_rkv_6_prefix_caching_does_not_corrupt_others(clean: Any) -> None:
    """Evictions wrote blocks that other requests shared. Also TriAttention: prefix caching had to be switched off."""
    (shared,) = random_prompts(64, seed=6)
    prompts = [shared + tail for tail in random_prompts(5, 6, 7, 8, seed=7)]
    asks = [Ask(p, 120, joins=40 * i) for i, p in enumerate(prompts)]
    outcome = storm(clean, asks, Serving.parse(KEEP), force=0)
    assert [outcome.hits[i] for i in range(4)] == [0, 64, 64, 64]
    assert first_difference(outcome.traces, expected(prompts, 120)) == [None] * 4


@pytest.mark.parametrize("draw", ["head", "layer", "model"])
def test_rkv_7_layers_evict_in_the_same_round(draw: str) -> None:
    """Layers decided for themselves, inside the forward, and drifted apart.

    Here layers may draw different victims, but a round is one event: in every layer and head the same newest entries
    move, onto equally many victims, none of them in the prompt.
    """
    serving_ = Serving.parse({**KEEP, "draw": draw})
    where = Heads(torch.arange(3), torch.arange(2), 2)
    table = torch.arange(10, 10 + CAP)[None]
    moves = Rounds(serving_, where, 32).plan([Tracked(serving_, list(range(30)), 0)], [2], table, [0])
    for (layer,) in moves:
        sources = (layer.src[0] - 10) * 32 + layer.src[1]
        victims = (layer.dst[0] - 10) * 32 + layer.dst[1]
        for head in range(2):
            assert sorted(sources[layer.heads == head].tolist()) == list(range(64, 80))
            chosen = victims[layer.heads == head].tolist()
            assert len(set(chosen)) == 16
            assert min(chosen) >= 30
            assert max(chosen) < 64
    drawn = {tuple(layer.dst[1].tolist()) for (layer,) in moves}
    assert len(drawn) == (1 if draw == "model" else 3)


@pytest.mark.parametrize("prompt", [1, 30, 63, 64, 65, 200])
def test_rkv_8_rounds_come_when_the_cache_is_full_not_at_round_numbers(prompt: int) -> None:
    """The cadence followed absolute counts, and fired when there was nothing to look at yet."""
    timeline = Timeline.of(Serving.parse(KEEP), prompt)
    due = [position for position in range(prompt + 200) if timeline.due(position)]
    assert due == list(range(timeline.kept + 16, prompt + 200, 16))
    assert due[0] - prompt >= 16  # the trace has its newest r before anything is evicted


@pytest.mark.vllm
def test_rkv_9_the_newest_stay_in_batches_of_prompts_and_traces(clean: Any) -> None:
    """The window of newest tokens was empty when a step mixed prompts and traces."""
    prompts = random_prompts(20, 250, 21, 260, seed=9)  # long ones come in chunks while short ones go through rounds
    asks = [Ask(p, 140, joins=60 * i) for i, p in enumerate(prompts)]
    traces = storm(clean, asks, Serving.parse(KEEP), force=0).traces
    assert first_difference(traces, expected(prompts, 140)) == [None] * 4


def test_rkv_10_slots_and_rounds_depend_on_positions_only() -> None:
    """No counter can be one step old: steps cut out of order, or twice, or by another worker, come out the same."""
    serving_ = Serving.parse(KEEP)

    def steps(positions: list[int]) -> dict[int, Any]:
        rows = Rows([Tracked(serving_, list(range(n)), 0) for n in (30, 70)])
        cut = {}
        for position in positions:
            (phase,) = rows.phases(np.array([0, 1, 2]), np.array([position, position + 40]))
            cut[position] = [x.tolist() for x in (phase.slots, phase.lengths, phase.rounds, phase.due)]
        return cut

    positions = list(range(70, 200))
    assert steps(positions) == steps(positions[::-1]) == steps(positions[::2] + positions[::2] + positions[1::2])


@pytest.mark.vllm
def test_rkv_11_a_preempted_request_starts_over(clean: Any) -> None:
    """The count of dropped entries outlived the blocks. Also TriAttention: stale slots after a resume."""
    (prompt,) = random_prompts(30, seed=11)
    llm = clean.llm_engine
    llm.add_request("0", {"prompt_token_ids": prompt}, params(160))
    trace: list[int] = []
    moments = [40, 51, 115, 116]  # before the first round, right when it is due (30 + 51 - 1 = 80), after several
    while llm.has_unfinished_requests():
        if len(trace) in moments:
            moments.remove(len(trace))
            llm.reset_prefix_cache(reset_running_requests=True)
        for answer in llm.step():
            trace = list(answer.outputs[0].token_ids)
    assert moments == []
    assert [trace] == expected([prompt], 160)


@pytest.mark.parametrize("policy", [name for name in runnable() if name != "full"])
def test_rkv_12_defaults_are_said_in_one_place(policy: str) -> None:
    """The patch's own default of a constant was not its paper's. Here a server's defaults are the library's.

    All but the scope: a server cannot refuse a prompt that is longer than the budget.
    """
    assert Serving.parse({"policy": policy, "budget": 2048}) == Serving(Settings(policy, 2048, scope="grow"))
    assert Serving.parse({"budget": 2048}).settings.policy == Settings(budget=2048).policy


@pytest.mark.vllm
def test_rkv_13_memory_does_not_grow(clean: Any) -> None:
    """Evicted blocks were never given back: 95 blocks for 1,500 tokens where 21 would do. Here a request takes none."""
    pool = scheduler(clean).kv_cache_manager.block_pool
    before = pool.get_num_free_blocks()
    held = blocks_of(clean, random_prompts(16), 1500)
    assert max(held) == CAP
    assert held[80:-1] == [CAP] * len(held[80:-1])
    assert pool.get_num_free_blocks() == before


# ---- TriAttention's holes -----------------------------------------------------------------------------


@pytest.mark.vllm
def test_triattention_an_unsupported_version_is_refused_when_asked_and_left_alone_otherwise(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No version was checked; on another vLLM the engine died at its first step."""
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from kvkeep.vllm import plugin, versions
    from kvkeep.vllm.tap import RequestTap

    monkeypatch.setattr(versions, "SUPPORTED", ("0.99",))
    called: list[object] = []
    monkeypatch.setattr(KVCacheSpecRegistry, "register", lambda *a, **k: called.append(a))
    plugin.register()
    assert called == []
    assert RequestTap(VllmConfig(), torch.device("cpu"), False).serving is None
    with pytest.raises(Refused, match="is not tested"):
        RequestTap(engine.llm_engine.vllm_config, torch.device("cpu"), False)


def test_triattention_ranks_draw_for_their_own_heads() -> None:
    """With tensor parallelism, every rank scored its keys by other heads' statistics."""
    serving_ = Serving.parse(KEEP)
    request = Tracked(serving_, list(range(30)), 5)
    event = request.timeline.event(1)

    def victims(layers: range, heads: range) -> torch.Tensor:
        where = Heads(torch.tensor(layers), torch.tensor(heads), 4)
        keys = serving_.policy.keys(look(serving_, [request], [event], where))
        return plan(keys, [event], 1).dst

    whole = victims(range(6), range(4))
    assert len({tuple(v.tolist()) for v in whole.flatten(0, 2)}) == 24  # every head draws for itself
    assert torch.equal(whole[:, :, 2:], victims(range(6), range(2, 4)))
    assert torch.equal(whole[:, 3:], victims(range(3, 6), range(4)))
