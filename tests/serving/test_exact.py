"""Traces on vLLM are those of the transformers engine, token by token, however vLLM cuts and shares its work."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from engines import Tokens, checkpoint, first_difference, generate, params, random_prompts, reference, serving

pytestmark = pytest.mark.vllm

KEEP: dict[str, Any] = {"policy": "random", "budget": 128, "buffer": 32, "seed": 3}
ODD: dict[str, Any] = {"policy": "random", "budget": 120, "buffer": 24, "seed": 3}  # no block size divides these
LENGTH = 520
LENGTHS = (5, 40, 77, 150, 64, 277)  # at K = 128 and r = 32 the longest two bring their own budgets
SAME = [None] * len(LENGTHS)


@cache
def _expected(path: str, keep: str, lengths: tuple[int, ...]) -> list[Tokens]:
    return reference(path, json.loads(keep), random_prompts(*lengths), LENGTH)


def expected(path: str, keep: dict[str, Any], lengths: tuple[int, ...] = LENGTHS) -> list[Tokens]:
    """Traces of the transformers engine, made once for each setting."""
    return _expected(path, json.dumps(keep, sort_keys=True), lengths)


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3"])
def test_models(kind: str) -> None:
    with serving(checkpoint(kind), KEEP) as llm:
        ours = generate(llm, random_prompts(*LENGTHS), LENGTH)
    assert first_difference(ours, expected(checkpoint(kind), KEEP)) == SAME


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gemma3"])
def test_another_seed_is_another_trace_from_the_first_rounds_on(kind: str) -> None:
    """So the traces above could have differed."""
    other = expected(checkpoint(kind), {**KEEP, "seed": 4})
    first = first_difference(expected(checkpoint(kind), KEEP), other)
    # Round 0 runs right before this token of the trace is fed.
    begin = [max(128, n + 64) + 32 - n for n in LENGTHS]
    apart = [where is not None and b < where < b + 200 for where, b in zip(first, begin, strict=True)]
    assert sum(apart) >= (5 if kind == "gemma3" else 6), first  # one of Gemma's traces goes in a circle from early on


@pytest.mark.parametrize(
    ("kind", "layout", "groups"), [("head-80", "vec16", 1), ("two-groups", "vec", 2)], ids=["head-80", "two-groups"]
)
def test_other_shapes(kind: str, layout: str, groups: int) -> None:
    """Heads in another layout; evicting layers in two groups, each with its own blocks and block table."""
    short, length = LENGTHS[:4], 260
    prompts = random_prompts(*short)
    with serving(checkpoint(kind), KEEP) as llm:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        builders = [group.get_metadata_builder() for groups in runner.attn_groups for group in groups]
        assert [b.keeper.layout.name for b in builders if hasattr(b, "keeper")] == [layout] * groups
        ours = generate(llm, prompts, length)
    assert first_difference(ours, reference(checkpoint(kind), KEEP, prompts, length)) == [None] * 4
    other = reference(checkpoint(kind), {**KEEP, "seed": 4}, prompts, length)
    assert None not in first_difference(ours, other)


@pytest.mark.parametrize(
    ("kind", "keep", "options"),
    [
        pytest.param("qwen3", KEEP, {"max_num_batched_tokens": 48}, id="chunked"),
        pytest.param("gemma3", KEEP, {"max_num_batched_tokens": 48}, id="chunked-sliding"),
        pytest.param("qwen3", KEEP, {"max_num_seqs": 2}, id="waiting"),
        pytest.param("qwen3", KEEP, {"block_size": 128}, id="blocks-of-128"),
        pytest.param("qwen3", ODD, {"block_size": 32}, id="odd-32"),
        pytest.param("qwen3", ODD, {"block_size": 64}, id="odd-64"),
        pytest.param("qwen3", ODD, {"block_size": 128, "max_num_batched_tokens": 50}, id="odd-128"),
    ],
)
def test_options(kind: str, keep: dict[str, Any], options: dict[str, Any]) -> None:
    with serving(checkpoint(kind), keep, **options) as llm:
        ours = generate(llm, random_prompts(*LENGTHS), LENGTH)
    assert first_difference(ours, expected(checkpoint(kind), keep)) == SAME


@pytest.mark.parametrize(
    "ways",
    [{"admission": "reserve"}, {"moving": "gather"}, {"moving": "gather", "one_by_one": True}, {"one_by_one": True}],
    ids=lambda ways: "-".join(map(str, ways.values())),
)
def test_ways_to_serve_change_no_token(ways: dict[str, Any]) -> None:
    with serving(checkpoint("qwen3"), {**KEEP, **ways}) as llm:
        ours = generate(llm, random_prompts(*LENGTHS), LENGTH)
    assert first_difference(ours, expected(checkpoint("qwen3"), KEEP)) == SAME


def cached(llm: Any, prompts: list[Tokens], length: int) -> tuple[list[Tokens], list[int]]:
    """Traces, and how many tokens of each prompt came from the prefix cache."""
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], [params(length)] * len(prompts), use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs], [o.num_cached_tokens for o in outputs]


def test_prefix_cache_hits() -> None:
    """Blocks that hold prompt alone are shared, and reading them changes no token."""
    prompts = random_prompts(*LENGTHS)
    # The first 100 tokens of the longest prompt, then others: three blocks of 32 are shared.
    relatives = [prompts[5][:100] + tail for tail in random_prompts(3, 60, 177, seed=2)]
    with serving(checkpoint("qwen3"), KEEP) as llm:
        first, hits = cached(llm, prompts, LENGTH)
        assert hits == [0] * len(LENGTHS)
        again, hits = cached(llm, prompts, LENGTH)
        # vLLM computes a prompt's last token anew, so that a prompt of 64 tokens hits one block.
        assert hits == [(n - 1) // 32 * 32 for n in LENGTHS]
        theirs, hits = cached(llm, relatives, LENGTH)
        assert hits == [96] * 3
        # A later turn finds its first prompt, and nothing of the trace that rounds were at.
        turn = prompts[3] + first[3][:200] + [1, 2, 3]
        _, hits = cached(llm, [turn], 8)
        assert hits == [150 // 32 * 32]
    assert first_difference(first, expected(checkpoint("qwen3"), KEEP)) == SAME
    assert first == again
    assert first_difference(theirs, reference(checkpoint("qwen3"), KEEP, relatives, LENGTH)) == [None] * 3


def test_prompts_that_rounds_write_are_not_shared() -> None:
    keep = {**KEEP, "protect": "prompt:0.5"}
    prompts = random_prompts(150, 277)
    with serving(checkpoint("qwen3"), keep) as llm:
        first, _ = cached(llm, prompts, LENGTH)
        again, hits = cached(llm, prompts, LENGTH)
    assert hits == [0, 0]
    assert first == again == reference(checkpoint("qwen3"), keep, prompts, LENGTH)


def test_seeds_of_requests() -> None:
    """`kvkeep_seed`, else the seed of the sampling; children of n = 2 have the seeds s and s + 1."""
    prompt = random_prompts(40)[0]
    samples = [0, 7, -1, 2**63 - 1, 5, 6, 9]
    wanted = reference(checkpoint("qwen3"), KEEP, [prompt] * len(samples), 300, samples)
    assert len({tuple(trace) for trace in wanted}) == len(samples)
    asked = [params(300, s) for s in samples[:4]]
    # The most probable token only, so that sampling is greedy: vLLM wants n = 1 with temperature 0.
    asked.append(params(300, temperature=1.0, top_k=1, n=2, seed=5))
    asked.append(params(300, samples[6], seed=1))
    with serving(checkpoint("qwen3"), KEEP) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt}] * len(asked), asked, use_tqdm=False)
    ours = [list(o.token_ids) for output in outputs for o in output.outputs]
    assert first_difference(ours, wanted) == [None] * len(samples)
