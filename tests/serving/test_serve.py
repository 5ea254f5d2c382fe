"""`kvkeep serve` with a real server: traces, seeds, refusals, numbers, and what is left when it is gone."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engines import checkpoint, first_difference, random_prompts, reference
from served import Server, served

from kvkeep.vllm import Serving
from kvkeep.vllm.timeline import Timeline

pytestmark = pytest.mark.vllm

KEEP = {"policy": "random", "budget": 128, "buffer": 32, "seed": 3}
WORDS = ["--policy", "random", "--budget", "128", "--buffer", "32", "--seed", "3"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with served(checkpoint("qwen3"), WORDS) as running:
        yield running


def eventually(holds: Callable[[], bool], seconds: float = 20) -> bool:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def test_traces_and_numbers(server: Server) -> None:
    prompts, samples = random_prompts(5, 40, 77, 150, 200), [0, 1, 7, -5, 2**40]
    before = server.metrics()
    traces = server.traces(
        [
            {"prompt": p, "max_tokens": 520, "vllm_xargs": {"kvkeep_seed": s}}
            for p, s in zip(prompts, samples, strict=True)
        ]
    )
    assert first_difference(traces, reference(checkpoint("qwen3"), KEEP, prompts, 520, samples)) == [None] * 5

    serving = Serving.parse(KEEP)
    timelines = [Timeline.of(serving, len(p)) for p in prompts]
    rounds = [t.rounds(t.prompt + 520 - 2) for t in timelines]  # the last token is never fed
    after = server.metrics()
    counted = {name: after[name] - before[name] for name in after}
    assert counted["requests_total"] == 5
    assert counted["grown_budgets_total"] == sum(t.grown > 0 for t in timelines) == 3
    assert counted["rounds_total"] == sum(rounds)
    assert counted["evicted_entries_total"] == sum(t.evicted(n) for t, n in zip(timelines, rounds, strict=True))
    assert counted["round_seconds_total"] > 0
    # Layers x heads x r; but a victim among the newest entries that move is not written.
    assert 0 < counted["moved_entries_total"] <= 3 * 2 * 32 * sum(rounds)
    assert after["blocks_in_use"] == after["blocks_saved"] == 0
    assert after["blocks_in_pool"] > 0
    assert "rounds so far" in server.said


def test_seeds(server: Server) -> None:
    (prompt,) = random_prompts(40, seed=2)
    ask: dict[str, Any] = {"prompt": prompt, "max_tokens": 400}
    same = [{"vllm_xargs": {"kvkeep_seed": s}} for s in (7, 7.0, "7")] + [{"seed": 7}]
    other = [{}, {"vllm_xargs": {"kvkeep_seed": 8}}, {"seed": 7, "vllm_xargs": {"kvkeep_seed": 9}}]
    traces = server.traces([{**ask, **more} for more in same + other])
    assert all(trace == traces[0] for trace in traces[:4])
    assert len({tuple(trace) for trace in traces[3:]}) == 4


@pytest.mark.parametrize("seed", ["x", "7.5", 7.5, [1], 2.0**63, 1e30])
def test_a_seed_that_is_none(server: Server, seed: Any) -> None:
    status, answer = server.post({"prompt": [1, 2], "max_tokens": 1, "vllm_xargs": {"kvkeep_seed": seed}})
    assert status == 400
    assert "kvkeep_seed must be a whole number" in answer["error"]["message"]


def test_a_client_that_hangs_up_frees_its_blocks(server: Server) -> None:
    (prompt,) = random_prompts(40, seed=4)
    with server.stream(prompt, 4000):
        assert eventually(lambda: server.metrics()["blocks_in_use"] == 5)  # (128 + 32) / 32
        assert eventually(lambda: server.metrics()["blocks_saved"] > 5)
    assert eventually(lambda: server.metrics()["blocks_in_use"] == 0)
    assert server.metrics()["blocks_saved"] == 0
    assert server.traces([{"prompt": prompt, "max_tokens": 3}])


def test_two_engines_and_nothing_left_after_sigterm() -> None:
    """Data parallelism: each engine has a scheduler and a worker of its own."""
    prompts = random_prompts(40, 41, 42, 43, seed=5)
    words, flags = [*WORDS, "--admission", "reserve"], ["--data-parallel-size", "2"]
    with served(checkpoint("qwen3"), words, *flags, VLLM_ENABLE_V1_MULTIPROCESSING="1") as running:
        assert len(running.counters) == 4
        traces = running.traces([{"prompt": p, "max_tokens": 300} for p in prompts])
        assert first_difference(traces, reference(checkpoint("qwen3"), KEEP, prompts, 300)) == [None] * 4
        page = running.get("/metrics")
        found = re.findall(r'^kvkeep:requests_total\{engine="(\d)".* (\S+)$', page, re.M)
        assert [engine for engine, _ in found] == ["0", "1"]
        assert sum(float(count) for _, count in found) == 4
        with running.stream([1, 2, 3], 4000):  # abandoned while it runs
            pass
        assert running.stop() == 0
        assert running.counters == []


def test_a_wrong_configuration_ends_the_start() -> None:
    running = Server(checkpoint("qwen3"), WORDS, "--kv-cache-dtype", "fp8")
    try:
        assert running.process.wait(120) != 0
        assert "kvkeep cannot serve this configuration" in running.said
        assert "use auto" in running.said
        assert running.counters == []
    finally:
        running.remove()
