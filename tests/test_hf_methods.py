"""Every scored method on a model: what each head evicts is what the formula names, round after round.

The formulas (``tests/formulas``) get queries, keys, values, attention, entropy and hidden states from a forward of the
plain model (``tests/observed``), so nothing of kvkeep's is on that side but kept positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from formulas.beaconkv import beaconkv, beacons_of
from formulas.expected import expected
from formulas.h2o import h2o
from formulas.infokv import infokv
from formulas.lagkv import lagkv
from formulas.rkv import rkv
from formulas.rpc import rpc
from formulas.tova import tova
from formulas.triattention import triattention
from kvkeep.policies import Policy, make_policy
from masked import Frame, Rule, force, taped
from models import left_pad, prompt, step, tiny
from observed import Seen, observe, seen_sets
from scored import Count
from small import PIECES, K, R, evict, in_pieces

Scores = list[list[dict[int, float]]]


@dataclass(frozen=True)
class Case:
    """A policy, how many queries it sees, and the scores it should give."""

    policy: str
    scores: Callable[[Seen], Any]
    options: dict[str, Any] = field(default_factory=dict)
    queries: int = R
    family: str = "qwen3"

    def make(self) -> Policy:
        return make_policy(self.policy, self.options)


def of_row(formula: Callable[..., Any], **options: Any) -> Callable[[Seen], Any]:
    return lambda seen: formula(seen.row, **options)


def of_past(seen: Seen, **options: Any) -> Any:
    return expected(seen.row, seen.past, seen.inv_freq, seen.rotary_scaling, **options)


def of_beacons(seen: Seen, beacons: int = 4, recent: int = 4, **options: Any) -> Any:
    kept = [[beacons_of(list(q), seen.prompt, recent, beacons) for q in layer] for layer in seen.past]
    return beaconkv(seen.row, kept, seen.inv_freq, seen.rotary_scaling, recent=recent, **options)


def of_prompt(seen: Seen, **options: Any) -> Any:
    """TriAttention with the prompt's own statistics."""
    pairs = len(seen.inv_freq)
    statistics = []
    for layer in seen.past:
        statistics.append([])
        for q in layer:
            z = q[: seen.prompt, :pairs] + 1j * q[: seen.prompt, pairs : 2 * pairs]
            statistics[-1].append((z.mean(0), np.abs(z).mean(0), q[: seen.prompt, 2 * pairs :].mean(0)))
    return triattention(seen.row, statistics, seen.inv_freq, seen.rotary_scaling, **options)


CASES = {
    "h2o": Case("h2o", of_row(h2o)),
    "h2o-mean": Case("h2o", of_row(h2o, count="mean"), {"count": "mean"}),
    "tova": Case("tova", of_row(tova), queries=1),
    "rpc": Case("rpc", of_row(rpc), {"queries": 3}, queries=3),
    "rpc-group": Case("rpc", of_row(rpc, heads="group"), {"queries": 6, "heads": "group"}, queries=6),
    "lagkv": Case("lagkv", of_row(lagkv, lag=5), {"lag": 5}),
    "rkv": Case("rkv", of_row(rkv), queries=8),
    "rkv-half": Case("rkv", of_row(rkv, lam=0.5, queries=4), {"lam": 0.5, "queries": 4}, queries=4),
    "infokv": Case("infokv", of_row(infokv)),
    "infokv-half": Case("infokv", of_row(infokv, alpha=0.4, heads="layer"), {"alpha": 0.4, "heads": "layer"}),
    "expected": Case("expected", of_past, queries=64),
    "expected-plain": Case(
        "expected", partial(of_past, covariance=False, future=16), {"covariance": False, "future": 16}, queries=64
    ),
    "beaconkv": Case("beaconkv", of_beacons, {"beacons": 4, "recent": 4}),
    "triattention": Case("triattention", of_prompt),
    "triattention-layer": Case("triattention", partial(of_prompt, mode="per_layer"), {"mode": "per_layer"}),
    "triattention-global": Case("triattention", partial(of_prompt, mode="global"), {"mode": "global"}),
}


def check(case: Case, monkeypatch: pytest.MonkeyPatch, frames: list[Frame], ids: Tensor, rule: Rule, first: int,
          row: int = 0, columns: int | None = None, family: str = "") -> Count:  # fmt: skip
    """Every round of a row against the formula."""
    count, family = Count(), family or case.family
    details = {"top": 256, "shift": 1}
    for seen in observe(monkeypatch, family, frames, ids, rule, first, case.queries, row, columns, **details):
        scores = case.scores(seen)
        for i, layer in enumerate(seen.row):
            for h, entries in enumerate(layer):
                if seen.gone[i][h]:
                    count.compare(seen.gone[i][h], scores[i][h], entries.candidates)
    return count


def say(count: Count, least: int, what: str) -> None:
    print(f"{what}: {count.near} near ties in {count.rounds} rounds of a head {count.worst}")
    assert count.rounds >= least
    assert count.near <= count.rounds // 20


@pytest.mark.parametrize("name", list(CASES))
def test_kept_sets_follow_the_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, ids = CASES[name], prompt(62, seed=4)
    model = tiny(case.family)
    with evict(model, case.policy, **case.options) as cache:
        frames = force(model, cache, ids, 11)
    say(check(case, monkeypatch, frames, ids, Rule(K, R, R, share=1), 11), 54, name)


@pytest.mark.parametrize("protect", ["none", "sinks:3", "prompt:0.5"])
@pytest.mark.parametrize("name", list(CASES))
def test_without_protection(name: str, protect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that the first round cuts down, in one chunk; another window than r."""
    case, ids = CASES[name], prompt(66, seed=5)
    model = tiny("llama")
    with evict(model, case.policy, **case.options, protect=protect) as cache:
        frames = force(model, cache, ids, 33)
    rule = Rule(K, R, R, sinks=3 if protect == "sinks:3" else 0, share=0.5 if protect == "prompt:0.5" else 0)
    say(check(case, monkeypatch, frames, ids, rule, 33, family="llama"), 40, f"{name} {protect}")


@pytest.mark.parametrize("family", ["llama-mha", "llama-mqa", "phi3", "gemma3", "gpt-oss"])
@pytest.mark.parametrize(
    "name", ["h2o", "tova", "rpc", "lagkv", "rkv", "infokv", "expected", "beaconkv", "triattention"]
)
def test_families(name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many KV heads as query heads, a single one, fused projections, sliding layers beside full ones."""
    case, ids = CASES[name], prompt(46, seed=4)
    model = tiny(family, "eager")
    with evict(model, case.policy, **case.options) as cache:
        frames = force(model, cache, ids, 11)
    say(check(case, monkeypatch, frames, ids, Rule(K, R, R, share=1), 11, family=family), 10, f"{name} {family}")


@pytest.mark.parametrize("name", list(CASES))
def test_a_padded_batch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of unequal prompts, one shorter than the queries' window, follow the formula as each alone would."""
    case, model = CASES[name], tiny("llama")
    lengths, trace = [13, 2, 7], prompt(45, seed=4)
    rows = [torch.cat([prompt(n, seed=n), trace], dim=1) for n in lengths]
    ids, mask = left_pad(rows).values()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with evict(model, case.policy, **case.options) as cache, taped(model, cache) as frames:
        for first, end in [(0, 13), *((t, t + 1) for t in range(13, 58))]:
            step(model, cache, ids[:, first:end], attention_mask=mask[:, :end], position_ids=positions[:, first:end])
    for i, n in enumerate(lengths):
        count = check(case, monkeypatch, frames, rows[i], Rule(K, R, R, share=1), n, i, 13, family="llama")
        say(count, 24, f"{name} row {i}")
        with evict(model, case.policy, **case.options) as cache:
            single = force(model, cache, rows[i], n)
        if not count.near:
            assert all(torch.equal(a.kept[i], b.kept[0]) for a, b in zip(frames, single, strict=True))


@pytest.mark.parametrize("name", list(CASES))
def test_chunks_keep_what_single_tokens_keep(name: str) -> None:
    case, model, ids, kept = CASES[name], tiny("llama"), prompt(75, seed=4), []
    for pieces in PIECES:
        with evict(model, case.policy, **case.options, prompt_length=11) as cache:
            in_pieces(model, cache, ids, 11, pieces)
            kept.append(cache.kept_positions())
            assert cache.stats()["rounds"] == [12]
    assert all(torch.equal(kept[0], other) for other in kept[1:])


@pytest.mark.parametrize("options", [{"policy": "vase", "queries": 5}, {"policy": "vase-dkv"},
                                     {"policy": "mix", "second": "rkv+queries=4", "share": 0.4},
                                     {"policy": "mix", "second": "beaconkv+beacons=4+recent=4"}])  # fmt: skip
def test_methods_that_draw(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine shows them what a plain forward shows: the same policy, asked with that, evicts the same."""
    options = dict(options)
    policy, ids = make_policy(options.pop("policy"), options), prompt(62, seed=4)
    model, count = tiny("qwen3"), Count()
    with evict(model, policy) as cache:
        frames = force(model, cache, ids, 11)
        stream = cache._streams.get(1)
    window = 4 if policy.name == "mix" else 5
    for seen in observe(monkeypatch, "qwen3", frames, ids, Rule(K, R, R, share=1), 11, window):
        made = seen.made(policy.scope)
        if "digest" in policy.signals:
            kept = [[np.stack(beacons_of(list(q), 11, 4, 4)) for q in layer] for layer in seen.past]
            made.digest = [torch.from_numpy(np.stack(layer)).float()[None] for layer in kept]
        view = made.view(seed=7, rounds=seen.number)
        view = type(view)(**{**vars(view), "streams": stream, "kept": (K,), "protected": (11,), "window": (R,)})
        scores = policy.keys(view).double()
        for i, layer in enumerate(seen.row):
            for h, e in enumerate(layer):
                told = dict(zip(e.candidates, scores[0, i, h].tolist(), strict=True))
                count.compare(seen.gone[i][h], told, e.candidates)
    say(count, 54, policy.name)


def test_seen_sets_agree_with_the_rule() -> None:
    from masked import replay

    with evict(tiny("llama"), "snapkv") as cache:
        frames = force(tiny("llama"), cache, prompt(50), 11)
    assert torch.equal(seen_sets(frames, 0), replay(frames, Rule(K, R, R, share=1), 11)[0])
