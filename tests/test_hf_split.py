"""Layers with budgets of their own: the sum is exact after every round, and everything else stays true."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import kvkeep
from formulas.infokv import infokv, masses
from formulas.pyramidkv import budgets
from formulas.snapkv import snapkv
from kvkeep import Settings
from kvkeep.budget import split
from kvkeep.hf.engine import HFEngine
from masked import Frame, Rule, close, force, masked_logits, taped
from models import left_pad, prompt, step, tiny
from observed import Seen, observe, seen_sets
from scored import Count
from small import K, R, evict
from test_load import make_tokenizer

L = 3
ADAPTIVE: dict[str, Any] = {"adaptive": True, "alpha": 0.5}
CASES: dict[str, dict[str, Any]] = {"pyramidkv": {}, "infokv": ADAPTIVE}


def wanted(name: str, seen: Seen) -> list[float]:
    """What each layer should get, by the formula: K on average."""
    if name == "infokv":
        mass = masses(seen.row)
        return [m / sum(mass) * L * K for m in mass]
    first = seen.row[0][0]
    stay = len(first.cached) - len(first.candidates)
    return [stay + b for b in budgets(K - stay, len(first.candidates), L)]


def held(frame: Frame, row: int = 0) -> list[int]:
    return [int(n) for n in (frame.kept[row][:, 0] >= 0).sum(-1)]


def check(name: str, family: str, frames: list[Frame], ids: Tensor, first: int, monkeypatch: Any, protect: str) -> int:
    """Budgets, kept sets and logits of every round; the number of rounds."""
    visible = seen_sets(frames, 0)
    rule = Rule(K, R, R, share=float(protect == "prompt"))
    count, number = Count(), 0
    for seen in observe(monkeypatch, family, frames, ids, rule, first, R, visible=visible):
        before = [len(layer[0].cached) for layer in seen.row]
        stay = len(seen.row[0][0].cached) - len(seen.row[0][0].candidates)
        assert seen.kept == split(wanted(name, seen), L * K, stay, before)
        scores = (snapkv if name == "pyramidkv" else lambda row: infokv(row, alpha=0.5))(seen.row)
        for i, layer in enumerate(seen.row):
            for h, entries in enumerate(layer):
                if seen.gone[i][h]:
                    count.compare(seen.gone[i][h], scores[i][h], entries.candidates)
        number += 1
    assert count.near <= count.rounds // 20
    expected, end = masked_logits(tiny(family, "eager"), ids[:, : visible.shape[-1]], visible), 0
    for frame in frames:
        end += frame.columns
        close(frame.logits[0], expected[end - frame.columns : end])
    return number


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("protect", ["prompt", "none"])
@pytest.mark.parametrize("name", list(CASES))
def test_rounds(name: str, protect: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("llama", attention), prompt(70, seed=4)
    with evict(model, name, **CASES[name], protect=protect) as cache:
        frames = force(model, cache, ids, 11)
        assert sum(held(frames[-1])) == L * cache.stats()["entries"][0]
    assert check(name, "llama", frames, ids, 11, monkeypatch, protect) == 11
    assert len({tuple(held(frame)) for frame in frames}) > 4
    assert any(len(set(held(frame))) == L for frame in frames), "all layers have different budgets"


def test_the_pyramid_is_one() -> None:
    """First layers hold more, and the first never more than there is."""
    model, ids = tiny("llama"), prompt(90, seed=4)
    with evict(model, "pyramidkv", budget=30) as cache:
        frames = force(model, cache, ids, 11)
    for frame in frames:
        counts = held(frame)
        assert counts == sorted(counts, reverse=True)
    assert held(frames[-1])[0] > held(frames[-1])[-1] + 8


@pytest.mark.parametrize("name", list(CASES))
def test_a_padded_batch_equals_each_row_alone(name: str) -> None:
    model, lengths, trace = tiny("llama"), [13, 2, 7], prompt(45, seed=4)
    rows = [torch.cat([prompt(n, seed=n), trace], dim=1) for n in lengths]
    ids, mask = left_pad(rows).values()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with evict(model, name, **CASES[name]) as cache, taped(model, cache) as frames:
        for first, end in [(0, 13), *((t, t + 1) for t in range(13, 58))]:
            step(model, cache, ids[:, first:end], attention_mask=mask[:, :end], position_ids=positions[:, first:end])
    for i, n in enumerate(lengths):
        with evict(model, name, **CASES[name]) as cache:
            single = force(model, cache, rows[i], n)
        for a, b in zip(frames, single, strict=True):
            width = b.kept[0].shape[-1]
            assert torch.equal(a.kept[i][..., :width], b.kept[0])
            assert (a.kept[i][..., width:] == -1).all()
            close(a.logits[i, -1], b.logits[0, -1])


@pytest.mark.parametrize("name", list(CASES))
def test_chunks_and_forcing(name: str) -> None:
    model = tiny("llama")
    engine = HFEngine(model, make_tokenizer(), Settings.of(name, budget=K, buffer=R, **CASES[name]))
    ids = prompt(75, seed=4)[0].tolist()
    with evict(model, name, **CASES[name]) as cache:
        frames = force(model, cache, torch.tensor([ids]), 11)
    expected = torch.stack([f.logits[0, -1] for f in frames[:-1]]).log_softmax(-1)
    found = engine.force([ids[:11]], [ids[11:]])[0]
    close(found.logprobs, expected.gather(-1, torch.tensor(ids[11:])[:, None])[:, 0])
    assert found.stats["entries"] <= K + R


@pytest.mark.parametrize("name", list(CASES))
def test_rows_can_be_selected(name: str) -> None:
    model, trace = tiny("llama"), prompt(50, seed=4)
    prompts = torch.cat([prompt(11, seed=i) for i in range(3)])
    alone = []
    for i in range(3):
        with evict(model, name, **CASES[name]) as cache:
            force(model, cache, torch.cat([prompts[i : i + 1], trace], dim=1), 11)
            alone.append(cache.kept_positions())
    with evict(model, name, **CASES[name]) as cache:
        force(model, cache, torch.cat([prompts, trace[:, :20].expand(3, -1)], dim=1), 11)
        cache.batch_select_indices(torch.tensor([2, 0]))
        for t in range(20, 50):
            step(model, cache, trace[:, t : t + 1].expand(2, -1))
        assert all(torch.equal(cache.kept_positions(row), alone[i]) for row, i in enumerate((2, 0)))


@pytest.mark.parametrize("name", list(CASES))
def test_bytes_are_those_of_the_layers(name: str) -> None:
    model = tiny("llama")
    with evict(model, name, **CASES[name]) as cache:
        force(model, cache, prompt(75, seed=4), 11)
        slots = [layer.capacity for layer in cache.evicting]
        assert cache.stats()["bytes"]["entries"] == sum(slots) * 2 * 2 * 8 * 4
        assert max(slots) < 90


def test_turns_and_masks_are_refused_or_appended() -> None:
    model, ids = tiny("llama"), prompt(80, seed=4)
    for protect in ("prompt", "none"):
        with evict(model, "pyramidkv", protect=protect) as cache, taped(model, cache) as frames:
            step(model, cache, ids[:, :11])
            for t in range(11, 50):
                step(model, cache, ids[:, t : t + 1])
            with cache.as_prompt():
                if protect == "prompt":
                    with pytest.raises(ValueError, match="layers have their own budgets by now"):
                        step(model, cache, ids[:, 50:54])
                    continue
                step(model, cache, ids[:, 50:54])
            for t in range(54, 80):
                step(model, cache, ids[:, t : t + 1])
            visible = seen_sets(frames, 0)
            close(frames[-1].logits[0], masked_logits(tiny("llama", "eager"), ids, visible)[-1:])
    keep = torch.ones(1, 1, 1, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match="their own budgets"), evict(model, "pyramidkv", keep=keep):
        pass


def test_policy_bytes_hold_the_numbers_beside_entries() -> None:
    """InfoKV: two float32 an entry and head, and the ring of queries."""
    model = tiny("llama")
    with kvkeep.evict(model, "infokv", budget=K, buffer=R) as cache:
        force(model, cache, prompt(60, seed=4), 11)
        slots = sum(layer.capacity for layer in cache.evicting)
        moves = sum(t.untyped_storage().nbytes() for m in cache._rounds._ahead.values() for t in (m.src, m.dst))
        ring = L * 4 * R * 8 * 4
        newest = 4  # the entropy that the next token's entry gets
        assert cache.stats()["bytes"]["policy"] == slots * 2 * 2 * 4 + ring + moves + newest


def test_split_is_near_what_was_wanted() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        n = int(rng.integers(1, 9))
        most = rng.integers(20, 60, n).tolist()
        want = rng.uniform(0, 80, n)
        total = int(rng.integers(n * 5, sum(most) + 1))
        found = split(want.tolist(), total, 5, most)
        assert sum(found) == total
        assert all(5 <= k <= m for k, m in zip(found, most, strict=True))
    assert split([10.3, 20.5, 29.2], 60, 2, [99] * 3) == [10, 21, 29]  # largest fraction first
    with pytest.raises(ValueError, match="cannot be split"):
        split([1, 1], 30, 5, [10, 10])
    with pytest.raises(ValueError, match="not a finite number"):
        split([1, float("nan")], 15, 5, [10, 10])
