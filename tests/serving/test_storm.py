"""Storms: whatever happens around a request, its trace is the one it has alone, and no block is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from engines import VOCAB, checkpoint, first_difference, generate, params, random_prompts, serving
from typer.testing import CliRunner

from kvkeep.bench import storms
from kvkeep.bench.storm import MOMENTS, Ask, Outcome, Tokens, alone, followers, storm, weather
from kvkeep.vllm import Serving

pytestmark = pytest.mark.vllm

KEEPS: dict[str, dict[str, Any]] = {
    "random": {"policy": "random", "budget": 64, "buffer": 16, "seed": 11},
    "blocks": {"policy": "random", "draw": "model", "unit": 32, "budget": 64, "buffer": 32, "seed": 11},
    "streaming": {"policy": "streaming", "budget": 64, "buffer": 16},
}
SMALL: dict[str, Any] = {
    "num_gpu_blocks_override": 16,  # blocks of 32 slots, one of them vLLM's own: five requests of K + r slots
    "max_num_batched_tokens": 48,  # fewer than K
    "max_model_len": 480,
}


def _alone(keep: dict[str, Any] | None, count: int, turns: int, seed: int) -> tuple[list[Ask], list[Tokens]]:
    """Requests, and the trace of each on an engine of its own."""
    asks = weather(count - turns, seed, VOCAB, (1, 150), (16, 200))
    with serving(checkpoint("qwen3"), keep, enable_prefix_caching=False) as llm:
        traces = alone(llm, asks)
        later = followers(asks, traces, turns, seed, VOCAB)
        return asks + later, traces + alone(llm, later)


def _storm(keep: dict[str, Any] | None, asks: Sequence[Ask], seed: int, **options: Any) -> tuple[Outcome, int]:
    """A storm, and how many requests were preempted in the step that had given them blocks already."""
    with serving(checkpoint("qwen3"), keep, **SMALL, **options) as llm:
        taken_back = [] if keep is None else _taken_back(llm)
        outcome = storm(llm, asks, None if keep is None else Serving.parse(keep), seed)
        return outcome, len(taken_back)


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def _taken_back(llm: Any) -> list[str]:
    """Will hold the requests that are preempted after they were scheduled in the same step."""
    scheduler, found = _scheduler(llm), []
    progress = scheduler.kv_cache_manager.coordinator.single_type_managers[0].progress
    preempt = scheduler._preempt_request

    def watched(request: Any, *args: Any, **kwargs: Any) -> None:
        # vLLM raises the number of computed tokens at the end of a step, kvkeep where it gives blocks.
        if progress._tokens[request.request_id] > request.num_computed_tokens:
            found.append(request.request_id)
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = watched
    return found


@pytest.mark.parametrize("name", KEEPS)
def test_traces_are_those_of_each_request_alone(name: str, record_property: Any) -> None:
    """Late joins, aborts, preemption by force and by a starved pool, twins, second turns beside the first."""
    keep = KEEPS[name]
    asks, expected = _alone(keep, count=40, turns=10, seed=1)
    outcome, _ = _storm(keep, asks, seed=2)
    _report(name, outcome, outcome.mismatches(expected, asks), record_property)
    assert outcome.mismatches(expected, asks) == {}
    assert outcome.lost == []
    assert set(outcome.forced) == set(MOMENTS)
    assert set(outcome.aborted) == {"tokens", "round", "preempted"}
    assert outcome.starved > 0
    assert max(outcome.replayed) >= 3
    assert any(outcome.hits.values()) == (name != "streaming")  # it protects no prompt, so none is shared


@pytest.mark.parametrize("options", [{"admission": "reserve"}, {"scheduling_policy": "priority"}], ids=str)
def test_other_ways_to_schedule(options: dict[str, str], record_property: Any) -> None:
    """Blocks reserved at admission; and priorities, where a request is preempted in the step that scheduled it."""
    reserve = options.get("admission") == "reserve"
    keep = KEEPS["random"] | (options if reserve else {})
    asks, expected = _alone(keep, count=24, turns=4, seed=3)
    outcome, taken_back = _storm(keep, asks, seed=4, **({} if reserve else options))
    _report(str(options), outcome, outcome.mismatches(expected, asks), record_property)
    assert outcome.mismatches(expected, asks) == {}
    assert outcome.lost == []
    assert outcome.preemptions > outcome.starved  # some were forced
    assert (outcome.starved > 0) == (taken_back > 0) == (not reserve)


def test_stock_vllm_in_the_same_storm(record_property: Any) -> None:
    """Only a record, beside the others, of how often stock vLLM's own traces depend on the batch."""
    asks, expected = _alone(None, count=40, turns=10, seed=1)
    outcome, _ = _storm(None, asks, seed=2)
    _report("stock", outcome, outcome.mismatches(expected, asks), record_property)
    assert outcome.lost == []
    assert outcome.starved > 0


def test_what_an_idle_engine_still_holds_is_found() -> None:
    """So the storms above could have lost something."""
    keep = KEEPS["random"]
    with serving(checkpoint("qwen3"), keep, **SMALL) as llm:
        manager = _scheduler(llm).kv_cache_manager.coordinator.single_type_managers[0]
        ask = Ask(random_prompts(40)[0], 60)
        assert storm(llm, [ask], Serving.parse(keep), force=0).lost == []
        for name, kept in (("manager", manager._held), ("progress", manager.progress._tokens)):
            kept["ghost"] = 1
            assert storm(llm, [], Serving.parse(keep)).lost == [f"kvkeep's {name} still knows requests ['ghost']"]
            del kept["ghost"]
        (block,) = manager.block_pool.get_new_blocks(1)
        assert storm(llm, [], Serving.parse(keep)).lost == [f"blocks [{block.block_id}] are still held"]
        manager.block_pool.free_blocks([block])


# ---- the command --------------------------------------------------------------------------------------


def _command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """`python -m kvkeep.bench.storms`, in this process."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")  # the command sets its own if there is none, and not back
    app = typer.Typer()
    app.command()(storms.main)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_runs_a_storm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    numbers = tmp_path / "storms.json"
    done = _command(
        monkeypatch, "--requests", "8", "--seed", "5", "--storms", "random, whole blocks", "--json", str(numbers)
    )
    assert done.exit_code == 0, done.output
    assert "random, whole blocks: 0 mismatches" in done.output
    (row,) = json.loads(numbers.read_text())["storms"]
    assert (row["requests"], row["mismatches"], row["lost"]) == (8, 0, [])
    assert row["tokens"] >= 8


@pytest.mark.parametrize(
    ("storm_", "trace", "lost", "code"),
    [
        ("random", [7, 8], [], 0),
        ("random", [7, 9], [], 1),
        ("random", [7], [], 1),
        ("random", [7, 8], ["blocks [3] are still held"], 1),
        ("stock", [7, 9], ["blocks [3] are still held"], 0),  # vLLM's own; shown beside the others
    ],
)
def test_the_command_fails_if_a_trace_or_a_block_is_lost(
    storm_: str, trace: Tokens, lost: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome([trace], lost=lost)
    monkeypatch.setattr(storms, "run", lambda *_: (outcome, [[7, 8]], [Ask([1], 2)]))
    monkeypatch.setattr(storms, "tiny_model", str)
    done = _command(monkeypatch, "--storms", storm_)
    assert done.exit_code == code, done.output
    assert f"{storm_}: {int(trace != [7, 8])} mismatches" in done.output
    assert ("[3]" in done.output) == bool(lost)
    assert ("blocks were lost (seed" in done.output) == (code == 1)


def test_an_unknown_storm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    done = _command(monkeypatch, "--storms", "random; hail")
    assert done.exit_code == 2
    assert "no storm 'hail'" in done.output


def _report(name: str, outcome: Outcome, wrong: dict[int, int], record: Any) -> None:
    line = f"{name}: {outcome}, {len(wrong)} mismatches {wrong}"
    print(line)
    record("storm", line)


# ---- traps, one by one --------------------------------------------------------------------------------


def _preempt(llm: Any, number: str) -> None:
    """Preempt one request, as vLLM's ``reset_prefix_cache`` does with all, but keep the prefix cache."""
    scheduler = _scheduler(llm)
    request = next(r for r in scheduler.running if r.request_id.startswith(f"{number}-"))
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def _steps(llm: Any, traces: dict[str, Tokens], count: int = 10_000) -> None:
    for _ in range(count):
        if not llm.llm_engine.has_unfinished_requests():
            return
        for answer in llm.llm_engine.step():
            traces[answer.request_id] = list(answer.outputs[0].token_ids)


def test_a_resumed_request_does_not_adopt_a_prompt_that_equals_its_trace() -> None:
    """Its own rounds would write the other's prompt blocks, and what they hold was computed without evictions."""
    keep = KEEPS["random"]
    (first,) = random_prompts(64)
    with serving(checkpoint("qwen3"), keep, num_gpu_blocks_override=64, max_model_len=2016) as llm:
        (whole,) = generate(llm, [first], 200)
        second = first + whole[:100]
        (answer,) = generate(llm, [second], 100)
        llm.reset_prefix_cache()
        traces: dict[str, Tokens] = {}
        llm.llm_engine.add_request("a", {"prompt_token_ids": first}, params(200))
        _steps(llm, traces, 110)
        llm.llm_engine.add_request("b", {"prompt_token_ids": second}, params(100))
        _steps(llm, traces, 5)
        _preempt(llm, "a")
        _steps(llm, traces)
    assert first_difference([traces["a"], traces["b"]], [whole, answer]) == [None, None]


def test_a_second_turn_hits_only_blocks_of_the_first_prompt() -> None:
    prompts = random_prompts(70, 96, 31)  # two full blocks of 32 and a bit; three; none
    with serving(checkpoint("qwen3"), KEEPS["random"], num_gpu_blocks_override=64, max_model_len=2016) as llm:
        traces = generate(llm, prompts, 100)
        turns = [p + t + [1, 2, 3] for p, t in zip(prompts, traces, strict=True)]
        inputs = [{"prompt_token_ids": p} for p in turns]
        answers = llm.generate(inputs, [params(60)] * 3, use_tqdm=False)
        assert [a.num_cached_tokens for a in answers] == [64, 96, 0]
        llm.reset_prefix_cache()
        afresh = [generate(llm, [turn], 60)[0] for turn in turns]
    assert [list(a.outputs[0].token_ids) for a in answers] == afresh


def test_equal_prompts_with_different_seeds_draw_differently_and_share_blocks() -> None:
    """Twins at once: they share the prompt's blocks, and each has the trace that it has alone."""
    (prompt,) = random_prompts(80)
    keep = KEEPS["random"]
    with serving(checkpoint("qwen3"), keep, num_gpu_blocks_override=64, max_model_len=2016) as llm:
        asks = [Ask(prompt, 150, sample) for sample in range(4)]
        expected = alone(llm, asks)
        llm.reset_prefix_cache()
        outcome = storm(llm, asks, Serving.parse(keep), force=0)
    assert outcome.traces == expected
    assert len({tuple(t) for t in expected}) == 4
    assert outcome.hits == {0: 0, 1: 64, 2: 64, 3: 64}


def test_requests_that_leave_the_middle_of_the_batch_do_not_move_draws_to_others() -> None:
    """Rows condense and are filled again; ends are staggered so that it happens in the steps of rounds too."""
    keep = KEEPS["random"]
    lengths = [200, 17, 180, 33, 160, 49, 140, 65]
    asks = [Ask(p, n, joins=3 * i) for i, (p, n) in enumerate(zip(random_prompts(*[24] * 8), lengths, strict=True))]
    asks += [Ask(p, 90, joins=20 + 16 * i) for i, p in enumerate(random_prompts(*[24] * 4, seed=5))]
    with serving(checkpoint("qwen3"), keep, num_gpu_blocks_override=64, max_model_len=2016) as llm:
        expected = alone(llm, asks)
        assert storm(llm, asks, Serving.parse(keep), force=0).traces == expected
