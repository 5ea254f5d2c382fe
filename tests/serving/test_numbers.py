"""Numbers of offline engines, numbers for servers of several front ends, and none where kvkeep is not asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines import checkpoint, generate, random_prompts, serving

from kvkeep.vllm import Serving, stats
from kvkeep.vllm.timeline import Timeline

pytestmark = pytest.mark.vllm

KEEP = {"policy": "random", "budget": 128, "buffer": 32, "seed": 3}


def expected(lengths: list[int], generated: list[int]) -> dict[str, float]:
    timelines = [Timeline.of(Serving.parse(KEEP), n) for n in lengths]
    # The last token is never fed.
    rounds = [t.rounds(t.prompt + n - 2) for t, n in zip(timelines, generated, strict=True)]
    return {
        "requests": len(lengths),
        "grown_budgets": sum(t.grown > 0 for t in timelines),
        "rounds": sum(rounds),
        "evicted_entries": sum(t.evicted(n) for t, n in zip(timelines, rounds, strict=True)),
        "blocks_in_use": 0,
        "blocks_saved": 0,
    }


@pytest.mark.parametrize("processes", ["0", "1"])
def test_stats_of_an_offline_engine(processes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", processes)
    with serving(checkpoint("qwen3"), KEEP) as llm:
        assert stats(llm) == dict.fromkeys(stats(llm), 0.0) | {"blocks_in_pool": stats(llm)["blocks_in_pool"]}
        assert stats(llm)["blocks_in_pool"] > 0
        # A round is due before position 160: the request of 121 tokens ends before it, the one of 122 with it.
        generated = [121, 122, 300, 200]
        generate(llm, random_prompts(40, 40, 77, 200), generated)
        found = stats(llm)
        wanted = expected([40, 40, 77, 200], generated)
        assert {name: found[name] for name in wanted} == wanted
        assert found["round_seconds"] > 0
        assert 0 < found["moved_entries"] <= 3 * 2 * 32 * wanted["rounds"]


STOCK = """
import json, logging, sys
from prometheus_client import REGISTRY, generate_latest
from vllm import LLM, SamplingParams
from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from kvkeep.vllm import stats

llm = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="float32", max_model_len=512, enforce_eager=True,
          max_num_seqs=2, disable_log_stats=False)
llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=300, ignore_eos=True, detokenize=False))
core = llm.llm_engine.engine_core.engine_core
runner = core.model_executor.driver_worker.worker.model_runner
layer = next(iter(runner.compilation_config.static_forward_context.values()))
manager, = core.scheduler.kv_cache_manager.coordinator.single_type_managers
builder = runner.attn_groups[0][0].get_metadata_builder()
print("FOUND", json.dumps({
    "metrics": "kvkeep:" in generate_latest(REGISTRY).decode(), "stats": stats(llm),
    "loggers": len(load_stat_logger_plugin_factories()),
    "classes": [type(x).__module__ for x in (layer.impl, builder, manager, manager.kv_cache_spec)],
}))
"""


def test_nothing_changes_where_it_is_not_asked_for(tmp_path: Path) -> None:
    """A logger of ours would switch statistics on that --disable-log-stats switched off."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "VLLM_LOG_STATS_INTERVAL": "0.1"}
    done = subprocess.run(
        [sys.executable, "-c", STOCK, checkpoint("qwen3")], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.rpartition("FOUND ")[2].splitlines()[0])
    assert found["metrics"] is False
    assert found["stats"] == {}
    assert found["loggers"] == 0
    assert all(module.startswith("vllm.") for module in found["classes"]), found["classes"]
    assert "kvkeep:" not in done.stdout + done.stderr
    assert not list(tmp_path.glob("kvkeep-*"))


PUSH = """
from kvkeep.vllm.counters import NAMES, Engine
from kvkeep.vllm.prometheus import Pushed
pushed = Pushed(Engine("1", 1, "m"))
pushed.push({**dict.fromkeys(NAMES, 0.0), "rounds": 3.0, "blocks_in_use": 7.0})
pushed.push({**dict.fromkeys(NAMES, 0.0), "rounds": 5.0, "blocks_in_use": 2.0})
"""
SHOW = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""


def test_several_front_ends_see_what_the_engine_leaves(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    shown = ""
    for program in (PUSH, SHOW):
        shown = subprocess.run(
            [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True
        ).stdout
    assert 'kvkeep:rounds_total{engine="1",model_name="m"} 5.0' in shown
    assert 'kvkeep:blocks_in_use{engine="1",model_name="m"} 2.0' in shown
