"""A mix keeps the best of one policy and the choice of another, for any share and any two policies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from formulas.mix import mixed
from kvkeep import Settings
from kvkeep.budget import Budget
from kvkeep.cli_options import read_options
from kvkeep.evals.arms import Arm
from kvkeep.plan import eviction_order
from kvkeep.policies import Mix, Policy, RandomAttention, make_policy, register
from kvkeep.policies import registry as known
from kvkeep.signals import DIGEST, ENTROPY, KEYS, POSITIONS, QUERIES, RoundView
from kvkeep.testing import Made, check_policy
from reference import uniform_inclusion

SHARES = (0.0, 0.25, 0.5, 0.8, 1.0)
PAIRS = [("random", "rkv"), ("recency", "knorm"), ("random", "beaconkv+beacons=0"), ("snapkv+queries=8", "rkv+lam=0.5")]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Policies that a test registers do not outlive it."""
    before = dict(known._registered)
    yield
    known._registered.clear()
    known._registered.update(before)


def stays(made: Made, keys: Tensor, view: RoundView) -> dict[tuple[int, int, int], set[int]]:
    """Positions that the planner keeps, by row, layer and head."""
    counts = [len(row[0][0].candidates) for row in made.heads_of]
    keys = keys.expand(len(counts), made.layers, made.heads, -1)
    order = eviction_order(keys, counts)
    found = {}
    for r, row in enumerate(made.heads_of):
        victims = len(row[0][0].cached) - view.kept[r]
        for i, layer in enumerate(row):
            for h, e in enumerate(layer):
                gone = order[r, i, h, : len(e.candidates)].argsort()[:victims].tolist()
                found[r, i, h] = set(e.candidates) - {e.candidates[c] for c in gone}
    return found


def scores_of(made: Made, keys: Tensor, r: int, i: int, h: int) -> dict[int, float]:
    line = keys.double().expand(len(made.lengths), made.layers, made.heads, -1)[r, i, h].tolist()
    return dict(zip(made.heads_of[r][i][h].candidates, line, strict=False))


# ---- what stays ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("victims", [2, 5, 11])
def test_brute_force(first: str, second: str, share: float, victims: int) -> None:
    policy = Mix(first, second, share)
    for seed in range(3):
        made = Made([60, 13, 31], kept=27, protected=seed, seed=seed)
        view = made.view(shuffle=seed, seed=seed)
        cached = [len(row[0][0].cached) for row in made.heads_of]
        view = replace(view, kept=tuple(max(c - victims, seed + 4) for c in cached))
        one, other = (part.keys(view) for part in policy.parts)
        for (r, i, h), found in stays(made, policy.score(view), view).items():
            keep = view.kept[r] - (cached[r] - len(made.heads_of[r][i][h].candidates))
            assert len(found) == keep
            of_first, of_second = (scores_of(made, keys, r, i, h) for keys in (one, other))
            assert found == mixed(of_first, of_second, share, keep)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_ends_are_the_parts(first: str, second: str) -> None:
    """share=1 is the first policy and share=0 the second, however different they are."""
    made = Made([60, 9, 31], seed=5)
    view = made.view()
    ends = [stays(made, Mix(first, second, share).score(view), view) for share in (1.0, 0.0, 0.5)]
    parts = [stays(made, part.keys(view), view) for part in Mix(first, second).parts]
    assert ends[0] == parts[0]
    assert ends[1] == parts[1]
    assert parts[0] != parts[1]
    assert ends[2] not in parts


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_it_is_a_policy(share: float) -> None:
    check_policy(Mix("recency", "rkv", share))
    check_policy(Mix("recency", "rpc", share))
    check_policy(Mix("random+draw=layer", "rpc", share))


def test_equal_scores() -> None:
    """Ties of the second go to the newer, and nobody is chosen twice."""
    made = Made([40], layers=1, heads=1)
    view = made.view()
    for e in made.heads_of[0][0]:
        for p in e.cached:
            e.keys[p][:] = 1.0
    view = replace(made.view(), kept=view.kept)
    found = stays(made, Mix("recency", "knorm", 0.5).score(view), view)[0, 0, 0]
    assert found == set(made.heads_of[0][0][0].candidates[2:])


@pytest.mark.slow
def test_random_draws_uniformly_from_what_is_left() -> None:
    """Two thirds by norm, the rest a fair draw: inclusion counts are uniform, and those of the best are full."""
    made = Made([60], kept=30, layers=1, heads=1, seed=1)
    e = made.heads_of[0][0][0]
    norms = {p: -float(np.linalg.norm(e.keys[p])) for p in e.candidates}
    counts, rounds = dict.fromkeys(e.candidates, 0), 3000
    for number in range(rounds):
        view = replace(made.view(rounds=number), kept=(19,))
        for p in stays(made, Mix("random", "knorm", 1 / 3).score(view), view)[0, 0, 0]:
            counts[p] += 1
    best = set(sorted(norms, key=norms.__getitem__)[-8:])
    assert {counts[p] for p in best} == {rounds}
    rest = np.array([counts[p] for p in e.candidates if p not in best])
    assert uniform_inclusion(rounds - rest, rounds, 11) > 1e-4


def test_the_rest_knows_nothing_of_a_stochastic_second() -> None:
    """VaSE's draws and random's have nothing in common, or random would keep VaSE's runners-up."""
    made = Made([900], kept=800, layers=1, heads=1, protected=4)
    view = made.view()
    random, vase = (part.keys(view)[0, 0, 0].double() for part in Mix("random", "vase+reserve=0").parts)
    assert abs(np.corrcoef(random, vase)[0, 1]) < 5 / np.sqrt(len(random))


# ---- what a mix asks of an engine ----------------------------------------------------------------


def test_signals_are_those_of_both() -> None:
    mix = Mix("random", "rkv")
    assert mix.signals == make_policy("rkv").signals
    assert Mix("random", "recency").signals == {POSITIONS, KEYS}
    assert Mix.signals == {POSITIONS, KEYS}
    assert not Mix("random", "recency").content_free
    assert mix.query_window(Budget(100, 20)) == 8
    assert Mix("random", "snapkv").query_window(Budget(100, 20, 30)) == 30


@pytest.mark.parametrize(
    ("first", "second", "scope"),
    [
        ("random", "rkv", "head"),
        ("random+draw=layer", "rpc", "layer"),
        ("random+draw=model", "rpc", "layer"),
        ("recency", "rpc", "layer"),
        ("recency", "random+draw=model", "model"),
        ("random+draw=layer", "rkv", "head"),
    ],
)
def test_scope(first: str, second: str, scope: str) -> None:
    assert Mix(first, second).scope == scope


def test_a_shared_score_is_not_mixed_with_sets_of_single_heads() -> None:
    with pytest.raises(ValueError, match=r"rpc scores one set for the scope 'layer'.*first=random\+draw=layer"):
        Mix("random", "rpc")
    with pytest.raises(ValueError, match="rpc"):
        Mix("rpc", "rkv+queries=32")


def test_query_windows_must_agree() -> None:
    budget = Budget(100, 20)
    with pytest.raises(ValueError, match=r"snapkv of 20 and rkv of 8 queries.*rkv\+queries=64"):
        Mix("snapkv", "rkv").check(0, budget)
    Mix("snapkv", "rkv+queries=20").check(0, budget)
    with pytest.raises(ValueError, match="queries"):
        Settings("mix", budget=100, buffer=20, options={"first": "snapkv"})


@dataclass(frozen=True)
class Made1(Policy):
    """A policy that makes signals of its own."""

    blocks: int = 7

    name: ClassVar[str] = "made1"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS, DIGEST, ENTROPY})
    digest_blocks: ClassVar[tuple[int, int | None]] = (5, 3)

    @property
    def entropy_shift(self) -> int:
        return 1

    @property
    def final_norm(self) -> bool:
        return True

    def entropy(self, logits: Tensor) -> Tensor:
        return logits.sum(-1)

    def digest(self, state: Tensor | None, queries: Tensor, positions: Tensor) -> Tensor:
        return queries[:, :, 0]

    def check(self, heads: int, budget: Budget) -> None:
        raise ValueError(f"asked about {heads} heads")

    def check_model(self, model: Any) -> None:
        raise ValueError(f"asked about {model}")

    def score(self, view: RoundView) -> Tensor:
        assert view.positions is not None
        return view.positions.float()


@pytest.mark.parametrize("texts", [("made1", "knorm"), ("random", "made1")])
def test_delegation(texts: tuple[str, str]) -> None:
    register(Made1)
    mix = Mix(*texts)
    assert mix.digest_blocks == (5, 3)
    assert Mix.digest_blocks == Policy.digest_blocks
    assert mix.entropy_shift == 1
    assert {DIGEST, ENTROPY} <= mix.signals
    ones = torch.ones(1, 2, 3, 4)
    assert torch.equal(mix.entropy(ones), ones.sum(-1))
    assert torch.equal(mix.digest(None, ones, torch.zeros(1, 3).long()), ones[:, :, 0])
    with pytest.raises(ValueError, match="asked about 4 heads"):
        mix.check(4, Budget(100, 20))
    with pytest.raises(ValueError, match="asked about a model"):
        mix.check_model("a model")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="both need the signal 'digest'"):
        Mix("made1", "made1+blocks=2")
    assert QUERIES not in mix.signals
    assert not Mix("random", "knorm").final_norm


# ---- spelling ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"share": 1.1}, "share must be a number from 0 to 1, got 1.1"),
        ({"share": "half"}, "share must be a number from 0 to 1"),
        ({"second": 3}, "second is the name of a policy, got 3"),
        ({"second": "rvk"}, "second='rvk': unknown policy 'rvk': did you mean rkv"),
        ({"second": "rkv+lam"}, r"is not spelled name\+option=value.*'lam'"),
        ({"second": "rkv+lam=1+lam=1"}, "is not spelled"),
        ({"second": "rkv+lam=7"}, r"second='rkv\+lam=7': lam must be a number"),
        ({"second": "rkv+lamb=0.5"}, "has no option 'lamb': it takes lam"),
        ({"first": "full"}, "cannot be mixed"),
        ({"first": "mix"}, "cannot be mixed"),
        ({"first": "random+unit=2"}, "cannot be mixed"),
        ({"second": "pyramidkv"}, "cannot be mixed"),
    ],
)
def test_bad_options(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy("mix", values)


def test_parts_are_spelled_on_one_line() -> None:
    mix = Mix("random+draw=layer+groups=null", " rkv + lam=0.5+variant=paper+beta=2")
    assert mix.parts == (RandomAttention("layer"), make_policy("rkv", {"lam": 0.5, "variant": "paper", "beta": 2}))
    assert replace(mix, share=0.1).parts == mix.parts


def test_command_line_arms_and_json() -> None:
    options = read_options(["second=beaconkv+recent=8", "share=0.25"])
    assert make_policy("mix", options) == Mix("random", "beaconkv+recent=8", 0.25)
    arm = Arm.parse("mix:second=rkv+lam=0.5+kernel=5,share=0.75,protect=none")
    assert make_policy(arm.policy, arm.options) == Mix("random", "rkv+lam=0.5+kernel=5", 0.75)
    settings = Settings.of(Mix("recency", "rkv+lam=0.5", 0.3), budget=300)
    assert Settings.from_json(settings.to_json()).make_policy() == Mix("recency", "rkv+lam=0.5", 0.3)
    assert set(json.loads(settings.to_json())["options"]) == {"first", "second", "share"}
    assert hash(Mix()) == hash(Mix())
