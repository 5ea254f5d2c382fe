"""What a sample's stats say it held and cost, against counting by hand; and the budget asserted at every forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvkeep import Settings
from kvkeep.engine import Sampling
from kvkeep.hf.cache import EvictCache
from kvkeep.hf.engine import HFEngine
from kvkeep.layout import Row
from models import prompt, tiny
from test_load import make_tokenizer

ARMS = {
    "full": Settings("full"),
    "random": Settings("random", budget=24, buffer=4),
    "tracked": Settings("random", budget=24, buffer=4, track_positions=True),
    "bare": Settings("random", budget=12, buffer=4, protect="none"),  # its first prompt is longer than K + r
    "growing": Settings("random", budget=24, buffer=4, growth=2.0),
    "wide": Settings("recency", budget=30, buffer=4, window=10),
}


def ids(n: int, seed: int = 0) -> list[int]:
    return [int(i) for i in prompt(n, seed).flatten()]


def bytes_now(cache: EvictCache) -> int:
    """Counted on the tensors of every layer."""
    tensors = [t for layer in cache.layers for t in _tensors(layer)]
    entries = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
    told = cache.stats()["bytes"]
    return entries + int(told["positions"]) + int(told["policy"])


def _tensors(layer: Any) -> list[torch.Tensor]:
    return [t for t in (getattr(layer, "k", layer.keys), getattr(layer, "v", layer.values)) if t is not None]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("arm", ARMS)
def test_stats_equal_a_count_by_hand(arm: str, family: str) -> None:
    """Rows end at different tokens; each has the numbers of its own trace, whatever the batch does afterwards."""
    prompts, entries, nbytes, rounds = [ids(18), ids(6, 1), ids(9, 2)], [], [], []

    def count(cache: EvictCache) -> None:
        nbytes.append(bytes_now(cache) / 3)
        rounds.append([row.trace_rounds for row in cache.rows])

    def look(cache: EvictCache) -> None:  # in a run of its own, since looking enlarges a position store
        entries.append([cache.kept_positions(i).shape[-1] for i in range(3)])

    free = HFEngine(tiny(family), make_tokenizer(), ARMS[arm]).generate(prompts, [0] * 3, Sampling(60, ignore_end=True))
    made = HFEngine(tiny(family), make_tokenizer(), ARMS[arm])
    made._end_tokens = lambda: [free[0].tokens[7], free[1].tokens[30]]  # type: ignore[method-assign]
    found = made.generate(prompts, [0] * 3, Sampling(60), on_token=count)
    made.generate(prompts, [0] * 3, Sampling(60), on_token=look)
    assert len({len(sample.tokens) for sample in found}) > 1
    for i, sample in enumerate(found):
        n, stats = len(sample.tokens), sample.stats
        held, cost = [row[i] for row in entries[:n]], nbytes[:n]
        assert stats["mean_entries"] == pytest.approx(sum(held) / n)
        assert stats["peak_entries"] == max(held)
        assert stats["mean_bytes"] == pytest.approx(sum(cost) / n)
        assert stats["peak_bytes"] == pytest.approx(max(cost))
        assert stats["entries"] == held[-1]
        assert stats["rounds"] == rounds[n - 1][i]
        assert stats["seen"] == len(prompts[i]) + n - 1 == stats["entries"] + stats["evicted"]
        assert stats["batch"] == 3


@pytest.mark.parametrize("arm", ARMS)
def test_forced_in_chunks_counts_like_token_by_token(arm: str) -> None:
    trace = HFEngine(tiny("llama"), make_tokenizer(), ARMS[arm]).generate(
        [ids(18)], [0], Sampling(60, ignore_end=True)
    )[0]
    forced = HFEngine(tiny("llama"), make_tokenizer(), ARMS[arm]).force([ids(18)], [trace.tokens])[0]
    same = [k for k in trace.stats if "bytes" not in k]
    assert {k: forced.stats[k] for k in same} == {k: trace.stats[k] for k in same}
    if arm != "full":  # a chunk of 59 tokens grows the storage in other steps than 59 forwards
        assert forced.stats["peak_bytes"] == pytest.approx(trace.stats["peak_bytes"], rel=0.2)


def test_a_row_that_holds_too_much_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: rounds come one token late."""
    late = Row.needs_round
    monkeypatch.setattr(Row, "needs_round", lambda row: late(row) and row.cached > row.limit)
    monkeypatch.setattr(Row, "space", lambda row: 1)
    made = HFEngine(tiny("llama"), make_tokenizer(), ARMS["random"])
    with pytest.raises(RuntimeError, match="row 1 holds 29 entries a head, but budget and buffer are 28"):
        made.generate([ids(6), ids(8)], [0, 0], Sampling(40, ignore_end=True))
    with pytest.raises(RuntimeError, match="row 0 holds 29 entries"):
        made.force([ids(8)], [ids(60)])


def test_storage_that_grows_too_large_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: rows are counted right, but the layers allocate more."""
    monkeypatch.setattr("kvkeep.hf.steps.bound", lambda rows: None)
    made = HFEngine(tiny("llama"), make_tokenizer(), ARMS["random"])
    with pytest.raises(RuntimeError, match="layer 0 has 136 slots a head, but budget and buffer are 28"):
        made.generate([ids(8)], [0], Sampling(40, ignore_end=True))


def test_the_planned_rounds_count() -> None:
    """Bytes change without any tensor of the layers changing."""
    made = HFEngine(tiny("llama"), make_tokenizer(), ARMS["random"])
    plain = made.force([ids(8)], [ids(60)])[0].stats
    without = plain["peak_bytes"] - plain["bytes"]["policy"]
    assert plain["bytes"]["policy"] > 0
    assert without == plain["bytes"]["entries"]
