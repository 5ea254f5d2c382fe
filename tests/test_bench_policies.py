"""Rounds of every policy side by side: they are the engine's rounds, and the table is whole. Nothing here is timed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from kvkeep.bench import policies as comparison
from kvkeep.bench.standin import ModelShape, StandIn
from kvkeep.cli import app
from kvkeep.evals.arms import Arm
from kvkeep.policies import policies
from kvkeep.signals import ATTENTION, DIGEST, ENTROPY, EVOLUTION, POSITIONS, QUERIES

CPU = torch.device("cpu")
ALL = comparison.names("all")

OBSERVED = {QUERIES, DIGEST, ATTENTION, ENTROPY, EVOLUTION}
K, r, L, B, H, D = 64, 16, 3, 2, 2, 8
SHAPE = ModelShape(L, B, H, D, torch.float32, query_heads=4, hidden=16, vocabulary=300)


@pytest.fixture(autouse=True)
def nothing_to_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests have no use for cold caches."""
    monkeypatch.setattr(comparison, "_SWEPT", 64)


def run_untimed(arm: Callable[[], object]) -> float:
    arm()
    return 1.0


def stand_in(spec: str, shape: ModelShape = SHAPE, seed: int = 3) -> StandIn:
    torch.manual_seed(seed)
    return StandIn(Arm.parse(spec).settings(K, r, seed), shape, CPU)


def test_all_are_kvkeeps_own_that_evict_with_their_variants() -> None:
    named = [spec.partition(":")[0] for spec in ALL]
    own = {p.name for p in policies().values() if p.evicts and p.__module__.startswith("kvkeep.")}
    assert set(named) == own >= {"random", "h2o", "rkv", "infokv", "mix"}
    assert len(set(ALL)) == len(ALL)
    assert set(comparison.VARIANTS) <= own
    assert {"infokv", "infokv:adaptive=true"} <= set(ALL)


@pytest.mark.parametrize("spec", ALL)
def test_rounds_are_the_engines(spec: str) -> None:
    """Full before a round, K entries on average after it, each a token of its own; memory is what tensors take."""
    with torch.inference_mode():
        cache = stand_in(spec)
        policy = cache.policy
        for number in range(3):
            assert all(row.needs_round() for row in cache.rows)
            cache.round()
            for i, row in enumerate(cache.rows):
                assert row.trace_rounds == number + 1
                assert row.cached == K
                kept = cache.rounds.kept_positions(i, cache.rows)  # [L, H, n], -1 fills up
                held = row.by_layer(L)
                assert sum(held) == K * L
                for layer in range(L):
                    for head in range(H):
                        here = kept[layer, head][kept[layer, head] >= 0]
                        assert len(here) == held[layer] == len(here.unique())
                        assert set(range(row.seen - r, row.seen)) <= set(here.tolist())  # the window
                        assert set(range(row.protected)) <= set(here.tolist())
            if number == 1:
                cache.trace(r)
            else:
                for _ in range(r):
                    cache.observe(run_untimed)
        assert cache.observes == bool(OBSERVED & policy.signals)
        assert cache.entries_nbytes() >= 2 * 4 * B * H * L * (K + r) * D
        if QUERIES in policy.signals:
            assert cache.watch.ring is not None
            assert cache.extra_nbytes() >= cache.watch.ring.nbytes == L * B * 4 * cache.watch.ring.window * D * 4
        beside = sum(layer.beside_nbytes for layer in cache.layers)
        numbers = len({ATTENTION, ENTROPY, EVOLUTION} & policy.signals)
        assert beside == sum(4 * B * H * layer.capacity * numbers for layer in cache.layers)
        assert cache.extra_nbytes() >= beside + (0 if spec.startswith("random") else cache.rounds.positions_nbytes)
        assert cache.temporary_nbytes() > 0


def test_observing_is_what_the_engine_does() -> None:
    """Attention adds up to one a query head, the ring holds the newest, entropy is that of the logits."""
    with torch.inference_mode():
        heavy = stand_in("h2o")
        heavy.round()
        layer = heavy.layers[1]
        assert layer.beside is not None
        before = layer.beside[:, :, :K, 0].clone()
        heavy.observe(run_untimed)
        received = layer.beside[:, :, : K + 1, 0]
        grown = received.sum(-1) - before.sum(-1)
        # two query heads a KV head, and at most 1.01 that the new entry came with
        assert torch.all((received[..., :K] > before) & (grown[..., None] > 2) & (grown[..., None] < 3.02))
        informed = stand_in("infokv:shift=0")
        informed.round()
        informed.observe(run_untimed)
        wanted = informed.policy.entropy(informed.logits[:, -1].float())
        layer = informed.layers[0]
        assert layer.beside is not None
        column = informed.watch.columns[ENTROPY]
        assert torch.allclose(layer.beside[:, :, K, column], wanted[:, None].expand(-1, H))


def test_pyramid_is_steep_before_it_is_timed() -> None:
    with torch.inference_mode():
        cache = stand_in("pyramidkv")
        cache.settle()
        held = cache.rows[0].by_layer(L)
        assert held[0] > held[1] > held[2]
        cache.round()
        cache.trace(r)
        assert cache.rows[0].by_layer(L) == held


def test_digests_are_not_fed_at_rounds_alone() -> None:
    """A digest of 64 tokens is half full at the default schedule, so that a round has to finish it."""
    with torch.inference_mode():
        torch.manual_seed(0)
        shape = ModelShape(1, 1, 1, 8, torch.float32, query_heads=1)
        cache = StandIn(Arm.parse("expected").settings(512, 64, 0), shape, CPU)
        assert cache.watch.digests is not None
        for _ in range(2):
            assert cache.watch.digests.pending(0) == 32
            cache.round()
            for _ in range(64):
                cache.observe(run_untimed)


def compare(specs: list[str], **values: Any) -> dict[str, Any]:
    common: dict[str, Any] = {"layers": 2, "heads": H, "query_heads": 4, "head_dim": D, "turns": 2}
    common |= {"hidden": 16, "vocabulary": 300, "device": "cpu", "show": False}
    return comparison.run(specs, (K,), r, (1, 2), **common | values)


def check_rows(result: dict[str, Any], specs: list[str], observed: bool) -> None:
    assert {"versions", "device", "threads", "seed", "shape", "rows"} <= set(result)
    labels = [Arm.parse(spec).label for spec in specs]
    assert [(row["policy"], row["batch"]) for row in result["rows"]] == [(x, b) for b in (1, 2) for x in labels]
    ratios = ["over_random"] + ["both_over_random"] * observed
    for row in result["rows"]:
        assert row["round_ms"] > 0
        assert row["layer_ms"] == row["round_ms"] / 2
        assert row["extra_share"] == row["extra_bytes"] / row["entries_bytes"]
        for name in ratios:
            low, high = row[f"{name}_interval"]
            assert 0 < low <= row[name] <= high
        assert (row["policy"] != "random") or row["over_random"] == 1
        assert ("between_ms" in row) == observed
        if observed:
            policy = Arm.parse(row["policy"]).settings(K, r, 0).make_policy()
            assert (row["between_ms"] > 0) == bool(OBSERVED & policy.signals)
            assert (row["between_once_ms"] > 0) == (ENTROPY in policy.signals)
            assert row["both_over_random"] >= row["over_random"]
    assert json.loads(json.dumps(result, allow_nan=False)) == json.loads(json.dumps(result))
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(comparison.table(result))
    printed = console.export_text()
    lines = {line.strip().split(" ")[0] for line in printed.splitlines()}
    assert lines >= {part for label in labels for part in re.split("[:,]", label)}


def test_every_policy_beside_random() -> None:
    check_rows(compare(ALL, turns=1), ALL, observed=True)


def test_random_is_added_and_observing_can_be_left_out() -> None:
    result = compare(["knorm", "h2o:count=mean"], observe=False)
    check_rows(result, ["random", "knorm", "h2o:count=mean"], observed=False)
    random = result["rows"][0]
    assert random["planned_ahead"] > 1
    assert random["turns"] == 2 * result["rows"][1]["turns"]  # before each of the others


def test_names_may_have_several_options() -> None:
    assert comparison.names("random, infokv:adaptive=true,top=8,knorm,knorm") == [
        "random", "infokv:adaptive=true,top=8", "knorm",
    ]  # fmt: skip
    assert POSITIONS not in comparison.names("random,all")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("snapkw", "did you mean snapkv"),
        ("random,full", "runs no rounds"),
        ("snapkv:kernels=3", "no option 'kernels'"),
        ("snapkv:kernel=4", "kernel"),
        ("snapkv:buffer=8", "leave its own out"),
        ("h2o:published=true", "leave its own out"),
        ("", "NAME"),
    ],
)
def test_mistakes_are_told_at_once(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        comparison.names(text)


def test_heads_and_turns_are_checked() -> None:
    with pytest.raises(ValueError, match="cannot share"):
        compare(["random"], query_heads=3)
    with pytest.raises(ValueError, match="at least 1"):
        compare(["random"], turns=0)


def test_command_line(tmp_path: Path) -> None:
    small = ["--budget", "64", "--buffer", "16", "--batch", "1", "--layers", "1", "--heads", "2", "--head-dim", "8"]
    small += ["--turns", "1", "--device", "cpu"]
    out = tmp_path / "round.json"
    done = CliRunner().invoke(app, ["bench", "round", "--policy", "snapkv", *small, "--no-observe", "--out", str(out)])
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    assert [row["policy"] for row in result["rows"]] == ["random", "snapkv"]
    assert result["shape"]["query_heads"] == 8
    assert "/random" in done.output
    done = CliRunner().invoke(app, ["bench", "round", *small])
    assert done.exit_code == 0, done.output
    assert "gather" in done.output
