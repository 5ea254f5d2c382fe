"""The benchmarks measure what the engine does and write what they promise. Nothing here is timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from kvkeep.bench import common, decode, memory, round
from kvkeep.settings import Settings

CPU = torch.device("cpu")
ENVIRONMENT = {"versions", "device", "threads", "seed", "rows"}


def check_result(result: dict[str, Any], columns: set[str], table: Any) -> None:
    """The environment is there, every row has the columns, it survives JSON, and the table can be printed."""
    assert set(result) >= ENVIRONMENT
    assert {"kvkeep", "torch", "transformers"} <= set(result["versions"])
    assert result["rows"]
    for row in result["rows"]:
        assert columns <= set(row)
        assert all(value > 0 for key, value in row.items() if key.endswith(("_ms", "_per_s")))
    json.dumps(result, allow_nan=False)
    console = Console(width=250, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table(result))
    assert console.export_text().count("\n") > len(result["rows"])


ROUND_COLUMNS = {"budget", "buffer", "batch", "draw_ms", "plan_ms", "move_ms", "gather_ms", "floor_ms"}


def test_round_schema() -> None:
    result = round.run(
        (64, 96),
        16,
        (1, 2),
        ("random", "streaming"),
        layers=2,
        heads=2,
        head_dim=8,
        repeats=2,
        device="cpu",
        show=False,
    )
    check_result(result, ROUND_COLUMNS, round.table)
    rows = result["rows"]
    assert [(r["policy"], r["batch"], r["budget"]) for r in rows] == [
        (policy, batch, budget) for policy in ("random", "streaming") for batch in (1, 2) for budget in (64, 96)
    ]
    for row in rows:
        assert row["gathered_bytes"] == 2 * row["budget"] * 2 * row["batch"] * 2 * 8 * 2
        # at most r moves and a window of r
        assert row["moved_bytes"] <= 2 * (16 + 16) * 2 * row["batch"] * 2 * 8 * 2


def test_round_refuses_what_it_cannot_time() -> None:
    with pytest.raises(ValueError, match="runs no rounds"):
        round.run(policies=("full",), show=False)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("random", {}),
        ("random", {"draw": "layer"}),
        ("random", {"draw": "model"}),
        ("random", {"groups": 2}),
        ("random", {"unit": 4}),
        ("recency", {}),
        ("streaming", {}),
    ],
)
@pytest.mark.parametrize("gather", ["index_select", "gather"])
def test_moves_leave_what_a_compaction_gathers(policy: str, options: dict[str, Any], gather: str) -> None:
    """For the same draws, every head holds the same set of entries, keys and values alike."""
    settings = Settings.of(policy, budget=256, buffer=32, seed=3, **options)
    L, B, H, D = 3, 2, 4, 8
    cache = round.InPlace(settings, round.Shape(L, B, H, D), CPU)
    cache.begin(5)
    cache.draw()
    cache.plan()
    compaction = round.Compaction(cache)
    compaction.choose()
    compaction.flatten()
    before = [
        (layer.k.clone(), layer.v.clone()) for layer in cache.layers if layer.k is not None and layer.v is not None
    ]
    cache.move()
    moved = [(layer.k, layer.v) for layer in cache.layers]
    for layer, (k, v) in zip(cache.layers, before, strict=True):
        layer.k, layer.v = k.clone(), v.clone()
    getattr(compaction, gather)()
    gathered = compaction_results(before, compaction.index)
    for (k, v), (gathered_k, gathered_v) in zip(moved, gathered, strict=True):
        assert k is not None
        assert v is not None
        for mine, other in ((k, gathered_k), (v, gathered_v)):
            assert torch.equal(mine[:, :, :256].sort(dim=2).values, other.sort(dim=2).values)
    size = B * H * 256 * D
    for layer, (gathered_k, gathered_v) in zip(cache.layers, gathered, strict=True):
        assert layer.k is not None
        assert layer.v is not None
        assert torch.equal(layer.k.view(-1)[:size].view_as(gathered_k), gathered_k)
        assert torch.equal(layer.v.view(-1)[:size].view_as(gathered_v), gathered_v)


def compaction_results(
    tensors: list[tuple[torch.Tensor, torch.Tensor]], index: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values at the kept slots, gathered plainly."""
    found = []
    for number, (k, v) in enumerate(tensors):
        at = index[number].unsqueeze(-1).expand(-1, -1, -1, k.shape[-1])
        found.append((k.gather(2, at), v.gather(2, at)))
    return found


def test_decode_schema_and_rounds() -> None:
    model = common.tiny_model(CPU, hidden_size=32, intermediate_size=32, num_hidden_layers=2)
    result = decode.run(model, (300, 700), 128, 16, alternations=5, generate=128, show=False)
    check_result(result, {"kind", "length", "full_tokens_per_s", "random_over_full_interval"}, decode.table)
    steps, generation = result["rows"][:-1], result["rows"][-1]
    for row in steps:
        assert row["random_rounds"] == row["alternations"]  # one in each turn
        assert row["full_rounds"] == row["dynamic_rounds"] == 0
        low, high = row["random_over_full_interval"]
        assert low <= row["random_over_full"] <= high
    assert generation["kind"] == "generation"
    assert generation["random_rounds"] == (64 + 128 - 128) // 16 - 1


def test_decode_arms_see_the_same_text_and_do_not_disturb_each_other() -> None:
    """Below the budget, every arm generates the same tokens; copies share the weights."""
    model = common.tiny_model(CPU, hidden_size=32, intermediate_size=32, num_hidden_layers=2)
    ids = decode.random_ids(model, 2, 100, seed=0)
    seen = []
    with torch.inference_mode():
        for settings in (None, Settings(policy="full"), Settings(policy="random", budget=256)):
            runner = decode.Runner(model, settings)
            assert runner.model is not model
            assert runner.model.lm_head.weight.data_ptr() == model.lm_head.weight.data_ptr()
            runner.fill(ids)
            tokens = []
            for _ in range(20):
                runner.steps(1)
                tokens.append(runner.next)
            seen.append(torch.cat(tokens, dim=1))
            runner.close()
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
    assert not model.model._forward_pre_hooks


def test_decode_refuses_too_few_turns() -> None:
    with pytest.raises(ValueError, match="at least 5"):
        decode.run(alternations=3, show=False)


def test_memory_adds_up() -> None:
    model = common.tiny_model(CPU, hidden_size=64, intermediate_size=32, num_hidden_layers=2)
    result = memory.run(model, 192, 2**20, 96, 16, prompt=16, show=False)
    check_result(result, {"entries_bytes", "mean_bytes", "peak_bytes", "largest_batch_extrapolated"}, memory.table)
    rows = {row["policy"]: row for row in result["rows"]}
    for row in rows.values():
        parts = row["entries_bytes"] + row["positions_bytes"] + row["policy_bytes"]
        assert parts == row["peak_bytes"]
        assert 0 < row["mean_bytes"] <= row["peak_bytes"]
        assert row["row_bytes"] == row["batch_2_peak_bytes"] - row["peak_bytes"]
        largest = row["largest_batch_extrapolated"]
        fixed = row["peak_bytes"] - row["row_bytes"]
        assert fixed + largest * row["row_bytes"] <= 2**20 < fixed + (largest + 1) * row["row_bytes"]
    entry = 2 * 8 * 4  # key and value of a head: 8 numbers of 4 bytes each
    assert rows["random"]["entries_bytes"] == 2 * 4 * (96 + 16) * entry
    assert rows["random"]["last_bytes"] == rows["random"]["entries_bytes"] + rows["random"]["policy_bytes"]
    assert rows["full"]["peak_bytes"] >= 2 * 4 * (16 + 192) * entry
    assert rows["random"]["positions_bytes"] == 0 < rows["streaming"]["positions_bytes"]
    assert rows["full"]["rounds"] == 0 < rows["random"]["rounds"]


def test_timing_helpers() -> None:
    order: list[str] = []
    arms = {name: (lambda name=name: order.append(name)) for name in "abc"}
    times = common.alternate(arms, 3, CPU, warm_up=1, shuffled=True)  # type: ignore[arg-type]
    assert order == list("abcbcacababc")
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3, "c": 3}
    low, high = common.interval([1.0, 2.0, 3.0, 4.0, 100.0])
    assert 1 <= low <= common.median([1.0, 2.0, 3.0, 4.0, 100.0]) == 3 <= high <= 100
    before = torch.get_num_threads()
    with common.threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


BARE = """
import sys
for name in ("pydantic", "typer", "rich", "matplotlib", "hypothesis", "pytest", "scipy"):
    sys.modules[name] = None  # importing it fails, as where it is not installed
import torch
torch.set_num_threads(1)
from kvkeep.bench.gpu import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_gpu_checks_run_with_torch_and_transformers_alone(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-c", BARE, "--out", str(out), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert result["ok"] is True
    assert set(result) >= ENVIRONMENT | {"round", "decode"}
    assert all(row["ok"] for row in result["rows"])


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_checks_say_that_there_is_no_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvkeep.bench.gpu", "--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no CUDA GPU" in done.stderr
    assert not list(tmp_path.iterdir())
