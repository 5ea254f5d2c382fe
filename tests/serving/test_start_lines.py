"""What an operator reads in the log: what is on, what it gains, what the pool cannot hold, who shares draws."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from engines import checkpoint, params, random_prompts, serving

from kvkeep.vllm import Refused

pytestmark = pytest.mark.vllm

Lines = list[tuple[str, str]]  # (level, line)

KEEP: dict[str, Any] = {"policy": "random", "budget": 128, "buffer": 32}
SMALL: dict[str, Any] = {"max_model_len": 1024, "num_gpu_blocks_override": 101}  # of 32 slots; one is vLLM's own
BEGIN = "kvkeep: random, K = 128 and r = 32 per KV head, admission grow: a request of 1024 tokens takes "


@pytest.fixture
def log() -> Iterator[Lines]:
    """What kvkeep logs. A filter, since vLLM takes handlers away each time that it sets its logging up."""
    logger, lines = logging.getLogger("vllm.kvkeep"), []

    def note(record: logging.LogRecord) -> bool:
        lines.append((record.levelname, record.getMessage()))
        return True

    logger.addFilter(note)
    yield lines
    logger.removeFilter(note)


def start(kind: str, keep: dict[str, Any] | None, **options: Any) -> None:
    with serving(checkpoint(kind), keep, **{**SMALL, **options}):
        pass


def test_the_first_line_says_what_is_on_and_what_it_gains(log: Lines) -> None:
    start("qwen3", KEEP)
    gain = "5 blocks of 32 slots instead of 32, so 20.0 such requests fit at once instead of 3.1"
    assert log == [("INFO", BEGIN + gain)]


@pytest.mark.parametrize("kind", ["gemma3", "two-groups"])
def test_beside_sliding_windows_it_leaves_the_total_to_vllm(kind: str, log: Lines) -> None:
    """Their blocks come from the same pool, so that evicting layers alone do not say how many requests fit."""
    start(kind, KEEP)
    said = "5 blocks of 32 slots instead of 32 (the line about the KV cache's concurrency counts all layers)"
    assert log == [("INFO", BEGIN + said)]


def test_a_budget_of_the_trace_alone_promises_no_total(log: Lines) -> None:
    start("qwen3", {**KEEP, "scope": "trace"})
    assert log == [("INFO", BEGIN + "5 blocks of 32 slots beside those of its prompt instead of 32")]


@pytest.mark.parametrize("keep", [None, {"policy": "full"}], ids=["not asked", "full"])
def test_nothing_is_said_where_nothing_is_evicted(keep: dict[str, Any] | None, log: Lines) -> None:
    start("qwen3", keep)
    assert log == []


@pytest.mark.parametrize(
    ("keep", "hints"),
    [
        (KEEP, ["160 slots in blocks of 64); --block-size 32 would waste none"]),
        ({**KEEP, "buffer": 64}, []),  # 192 slots fill three blocks
        ({**KEEP, "budget": 120, "buffer": 24}, []),  # no size that CPUs take divides 144
    ],
    ids=["wastes", "fills", "no better one"],
)
def test_a_better_block_size_is_named(keep: dict[str, Any], hints: list[str], log: Lines) -> None:
    start("qwen3", keep, block_size=64)
    assert log[0][1].startswith("kvkeep: random, K = ")
    assert log[1:] == [("INFO", f"kvkeep: the last of a request's blocks is not full ({hint}") for hint in hints]


def test_a_pool_that_a_prompt_may_overfill_is_refused_unless_prompts_are_shorter() -> None:
    start("qwen3", KEEP, num_gpu_blocks_override=33)
    with pytest.raises(Refused, match=r"the pool has 31 blocks of 32 slots, and a prompt of 1023 tokens needs 32.*"
                       r'lower --max-model-len.*"max_prompt": 896'):  # fmt: skip
        start("qwen3", KEEP, num_gpu_blocks_override=32)
    start("qwen3", {**KEEP, "max_prompt": 896}, num_gpu_blocks_override=32)
    with pytest.raises(Refused, match="a prompt of 897 tokens needs 32"):
        start("qwen3", {**KEEP, "max_prompt": 897}, num_gpu_blocks_override=32)


def test_requests_that_share_their_draws_are_warned_of_once(log: Lines) -> None:
    one, other = random_prompts(40, 41)

    def ask(*requests: tuple[list[int], int | None]) -> int:
        """Warnings after these requests, sent together."""
        inputs = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        llm.generate(inputs, [params(4, sample) for _, sample in requests], use_tqdm=False)
        return sum(level == "WARNING" and "requests with the same prompt and the same seed" in x for level, x in log)

    with serving(checkpoint("qwen3"), KEEP, **SMALL) as llm:
        assert ask((one, None), (other, None)) == 0
        assert ask((one, 1), (one, 2), (one, None)) == 0
        assert ask((one, 1), (other, None), (one, 1)) == 1
        assert ask((one, None), (one, None)) == 1
    assert any("give each a seed: `seed`, or kvkeep_seed in vllm_xargs" in line for _, line in log)


def test_a_prompt_beyond_what_was_promised_is_named_once(log: Lines) -> None:
    short, long = random_prompts(20, 900)
    with serving(checkpoint("qwen3"), {**KEEP, "max_prompt": 100}, **{**SMALL, "num_gpu_blocks_override": 11}) as llm:
        engine = llm.llm_engine
        engine.add_request("long", {"prompt_token_ids": long}, params(4))
        for _ in range(3):
            assert engine.step() == []
        errors = [line for level, line in log if level == "ERROR"]
        assert len(errors) == 1
        assert "a prompt of 900 tokens does not fit into the pool of 10 blocks, although max_prompt = 100" in errors[0]
        engine.abort_request(["long"], internal=False)
        assert (
            len(llm.generate([{"prompt_token_ids": short}], [params(4)], use_tqdm=False)[0].outputs[0].token_ids) == 4
        )
