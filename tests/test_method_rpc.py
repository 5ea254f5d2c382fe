"""RPC: attention among the candidates, one kept set a layer, and a kept trace that grows."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from formulas.rpc import rpc
from kvkeep import Settings
from kvkeep.budget import Budget
from kvkeep.layout import Row
from kvkeep.policies import RPC, make_policy
from kvkeep.testing import Made, check_policy
from test_method_snapkv import LONG


@pytest.mark.parametrize(
    "options", [{}, {"heads": "group"}, {"kernel": 1}, {"kernel": 3, "heads": "group"}, {"region": "cached"}]
)
def test_formula(options: dict[str, Any]) -> None:
    policy, formula = make_policy("rpc", options), partial(rpc, **options)
    for shapes in ({}, {"shapes": LONG}):
        found = check_policy(policy, formula, **shapes)
        assert found.near <= found.compared // 50


def test_the_formula_can_fail() -> None:
    for other in ({"kernel": 5}, {"heads": "group"}):
        with pytest.raises(AssertionError, match="by the reference"):
            check_policy(RPC(), partial(rpc, **other))


@pytest.mark.parametrize("heads", ["layer", "group"])
def test_each_query_gives_the_candidates_everything(heads: Any) -> None:
    """The softmax knows the candidates alone: R queries, a mass of R; what else is cached does not matter."""
    policy = RPC(kernel=1, heads=heads)
    made = Made([60, 31], w=4, window=4, shared=policy.scope)
    scores = policy.score(made.view())
    assert scores.shape[2] == (1 if heads == "layer" else made.heads)
    for r, row in enumerate(made.heads_of):
        total = scores[r, ..., : len(row[0][0].candidates)].sum(-1)
        assert torch.allclose(total, torch.full_like(total, 4.0), rtol=1e-5)
    for e in (e for row in made.heads_of for layer in row for e in layer):
        e.keys.update({p: 5 * e.keys[p] for p in e.cached if p not in e.candidates})
    assert torch.equal(policy.score(made.view()), scores)


def rounds(settings: Settings, prompt: int) -> list[tuple[int, int]]:
    """(trace tokens so far, entries left) of each compression of a long trace."""
    row, found = Row.new(settings.make_budget(), settings.protection), []
    row.add_prompt(prompt)
    for generated in range(12_000):
        if row.needs_round():
            event = row.next_round()
            assert event.window + event.newest == settings.window
            row.apply(event)
            found.append((generated, row.cached))
        row.add_trace(1)
    return found


@pytest.mark.parametrize("prompt", [1, 100, 5000])
@pytest.mark.parametrize("queries", [32, 16])
def test_the_kept_trace_grows_as_published(prompt: int, queries: int) -> None:
    """After N compressions: the prompt, N P / c and R; then P more tokens until the next."""
    found = rounds(Settings("rpc", options={"queries": queries}, **RPC(queries).schedule(0)), prompt)
    assert len(found) >= 10
    assert [left for _, left in found] == [prompt + n * 1024 // 4 + queries for n in range(1, len(found) + 1)]
    assert {b[0] - a[0] for a, b in pairwise(found)} == {1024}


def test_the_first_compression_runs_at_p_and_r_tokens() -> None:
    assert rounds(Settings("rpc", **RPC().schedule(0)), 100)[0][0] == 1024 + 32


def test_schedule_and_options() -> None:
    assert RPC().schedule(2048) == {"budget": 288, "buffer": 1024, "window": 32, "growth": 4.0, "scope": "trace"}
    assert RPC().query_window(Budget(2048, 64)) == 32
    assert (RPC().scope, RPC(heads="group").scope) == ("layer", "head")
    for options, says in (
        ({"queries": 0}, "queries must be a whole number of at least 1, got 0"),
        ({"kernel": 2}, "kernel must be odd, got 2"),
        ({"heads": "all"}, "heads must be layer or group, got 'all'"),
    ):
        with pytest.raises(ValueError, match=says):
            make_policy("rpc", options)
