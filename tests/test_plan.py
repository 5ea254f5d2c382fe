"""The plan and the layout, round by round, against naive lists: what every engine relies on."""

from __future__ import annotations

import re
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from checks import check_event, check_row
from kvkeep import cpu
from kvkeep.budget import Budget, Scope
from kvkeep.draws import rank_keys, round_words
from kvkeep.layout import Round, Row
from kvkeep.plan import plan
from kvkeep.policies import Policy, RandomAttention, Recency
from kvkeep.protection import Protection
from reference import Slots, naive_event, naive_victims, real_moves

QUICK = settings(max_examples=300, deadline=None, derandomize=True)


@st.composite
def cases(draw: st.DrawFn, most_rows: int = 3) -> Slots:
    """Budgets down to their edges, unequal prompts, over-long unprotected prompts, growth, all draws."""
    r, w = draw(st.integers(1, 6)), draw(st.integers(0, 8))
    kind = draw(st.sampled_from(["prompt", "prompt", "sinks", "none", "share"]))
    P = draw(st.integers(0, 7))
    K = max(P + w, r + 1, w) + draw(st.sampled_from([0, 0, 1, 2, 5, 12]))  # 0: no choice at all is left
    rows = draw(st.integers(1, most_rows))
    longest = {"prompt": P, "sinks": K + 9, "none": K + 9, "share": P}[kind]  # K + 9 > K + r: over-long
    prompts = draw(st.lists(st.integers(0, longest), min_size=rows, max_size=rows))
    protection = Protection.parse(
        {"prompt": "prompt", "sinks": f"sinks:{P}", "none": "none", "share": "prompt:0.5"}[kind]
    )
    growth = draw(st.sampled_from([None, None, 1, 1.5, 3, 100]))
    scope = draw(st.sampled_from(["total", "total", "trace", "grow"]))  # trace: rows are due together
    policy: Policy = draw(
        st.sampled_from(
            [
                RandomAttention(),
                RandomAttention("layer"),
                RandomAttention("model"),
                RandomAttention(groups=2),
                Recency(),
            ]
        )
    )
    heads = 2 * draw(st.integers(1, 2)) if policy == RandomAttention(groups=2) else draw(st.integers(1, 3))
    seed = draw(st.integers(-3, 2**40))
    return Slots(
        policy, Budget(K, r, w, growth, scope), protection, prompts, range(rows), draw(st.integers(1, 2)), heads, seed
    )


@given(cases(), st.integers(1, 60))
@QUICK
def test_rounds_keep_their_promises(slots: Slots, tokens: int) -> None:
    """Invariant 3, and every slot against the naive plan, over many rounds of unequal rows."""

    def watch(self: Slots, which: list[int], events: list[Round], *rest: Tensor) -> None:
        check_event(self, which, events, *rest)  # type: ignore[arg-type]
        for i in which:
            check_row(self, i)

    slots.watch = watch
    slots.trace(tokens)
    for row in slots.rows:
        assert row.limit is not None
        assert row.cached <= max(row.limit, row.prompt_length)
        assert row.cached == row.seen - row.evicted


@given(cases(), st.integers(1, 40))
@QUICK
def test_rows_do_not_depend_on_their_batch(slots: Slots, tokens: int) -> None:
    """Invariant 5: each row holds, slot by slot, what it holds alone."""
    slots.trace(tokens)
    for i, n in enumerate(slots.prompts):
        alone = Slots(
            slots.policy, slots.budget, slots.protection, [n], [slots.streams[i]], slots.L, slots.H, slots.seed
        )
        alone.trace(tokens)
        assert torch.equal(alone.kept(), slots.kept(i))


@st.composite
def events(draw: st.DrawFn) -> Round:
    """Any round or turn that the layout could ask for."""
    turn = draw(st.booleans())
    candidates = draw(st.integers(0, 12))
    victims = draw(st.integers(0, candidates))
    fresh = draw(st.integers(0, 6)) if turn else 0
    newest = 0 if turn else draw(st.integers(0, 6))
    return Round(draw(st.integers(0, 9)), draw(st.integers(0, 5)), candidates, victims, 2, newest, fresh, turn)


@given(st.lists(events(), min_size=1, max_size=5), st.booleans(), st.integers(0, 2**31 - 1))
@settings(QUICK, max_examples=600)
def test_mixed_events_equal_single_plans(todo: list[Round], scored: bool, seed: int) -> None:
    """Rounds and turns of different sizes in one call: same moves as alone, and as the naive plan's."""
    generator = torch.Generator().manual_seed(seed)
    width = max(e.candidates for e in todo)
    shape = (len(todo), 1, 2, width)
    keys = torch.stack([torch.randperm(width, generator=generator) for _ in range(2 * len(todo))]).view(shape)
    keys = (keys // 3).float() - 1 if scored else keys.int()  # scores tie
    together = plan(keys, todo)
    for i, event in enumerate(todo):
        alone = plan(keys[i : i + 1, ..., : event.candidates], [event])
        for head in range(2):
            moved = real_moves(together, i, 0, head)
            assert moved == real_moves(alone, 0, 0, head)
            dead = naive_victims(keys[i, 0, head, : event.candidates].tolist(), event.victims)
            before = list(range(40))
            after = naive_event(before, replace(event, window=0), dead)
            assert {slot: after[slot] for slot in before if after[slot] != slot} == moved


def test_plan_without_victims_moves_nothing() -> None:
    """Growth can reach a round that evicts nobody."""
    moves = plan(torch.arange(6, dtype=torch.int32).view(1, 1, 1, 6), [Round(3, 2, 6, 0, 2)])
    assert moves.empty


def test_plan_refuses_other_dtypes() -> None:
    """float64 scores would need other sorting bits; int64 keys would lose theirs."""
    for dtype in (torch.float64, torch.float16):
        with pytest.raises(TypeError, match=re.escape(str(dtype))):
            plan(torch.zeros(1, 1, 1, 6, dtype=dtype), [Round(0, 0, 6, 2, 2)])


# ---- units and shared draws -------------------------------------------------------------------


@given(
    st.integers(2, 4),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 3),
    st.integers(0, 9),
    st.sampled_from(["total", "trace", "grow"]),
    st.integers(0, 10**6),
)
@QUICK
def test_units_live_and_die_together(
    unit: int, r: int, w: int, spare: int, prompt: int, scope: Scope, seed: int
) -> None:
    """All or none of u slots survive, as told; the unit that straddles P counts as protected."""
    start = -(-prompt // unit)
    total = max(start + w if scope == "total" else w, r + 1) + spare
    budget = Budget(total * unit, r * unit, w * unit, scope=scope)
    slots = Slots(RandomAttention(unit=unit), budget, Protection.parse("prompt"), [prompt], [4], 1, 3, seed)
    slots.watch = check_event
    for _ in range(4):
        slots.rounds(1)
        check_row(slots, 0)
        assert slots.rows[0].cached % unit == 0
        for head in slots.kept().flatten(0, 1).tolist():
            held = set(head)
            assert set(range(min(start * unit, slots.rows[0].cached))) <= held  # the straddling unit too
            assert all((p - p % unit + k in held) for p in held for k in range(unit))


def test_units_that_do_not_align_are_refused() -> None:
    """What would tear units apart is refused before any token, not found out in a round."""
    RandomAttention(unit=2).check(0, Budget(16, 4, 2))
    for unit, budget, says in [
        (3, Budget(15, 4, 3), "buffer of 4"),
        (3, Budget(16, 3), "budget of 16"),
        (2, Budget(16, 4, 3), "window of 3"),
        (2, Budget(16, 4, growth=2), "constant budget"),
    ]:
        with pytest.raises(ValueError, match=f"unit={unit}.*{says}"):
            RandomAttention(unit=unit).check(0, budget)
    row = Row.new(Budget(16, 4), Protection.parse("none"), unit=2)
    row.add_prompt(20)
    assert row.next_round().victims == 4
    with pytest.raises(ValueError, match=r"unit=2 cannot cut a prompt of 21 tokens"):
        row.add_prompt(1)


# ---- the short cut on CPUs --------------------------------------------------------------------


@pytest.mark.parametrize(("width", "count"), [(13, 1), (200, 4), (200, 64), (2048, 64), (16_384, 1), (5000, 1000)])
def test_wide_draws_give_the_lowest_keys(width: int, count: int) -> None:
    """The bound that spares a full topk must not lose or invent a victim."""
    words = round_words(4, torch.arange(3), torch.arange(4), torch.arange(50), torch.arange(3))
    keys = rank_keys(words, torch.arange(width, dtype=torch.int32))
    expected = keys.sort(dim=-1).indices[..., :count].sort(dim=-1).values
    slots = torch.arange(width).expand_as(keys)
    moves = plan(keys, [Round(0, 0, width, count, 0)] * 3)
    after = slots.scatter(-1, moves.dst, slots.gather(-1, moves.src))[..., : width - count]
    gone = torch.ones_like(keys, dtype=torch.bool).scatter_(-1, after, False)
    assert torch.equal(gone.nonzero()[:, -1].view_as(expected), expected)
    short_cut = cpu.lowest_draws(keys, count)
    assert short_cut is None or torch.equal(short_cut.sort(dim=-1).values, expected)


@pytest.mark.parametrize("start", [0, 2**31 - 300])
def test_unlucky_draws_fall_back(start: int) -> None:
    """Keys that lie all above, or all below, the bound are as good as any other."""
    low = -(2**31) if start == 0 else start
    keys = (low + torch.randperm(300, generator=torch.Generator().manual_seed(1))).int().expand(1, 1, 2, 300).clone()
    keys[0, 0, 1] = rank_keys(torch.tensor(7), torch.arange(300, dtype=torch.int32))  # beside an ordinary head
    slots = torch.arange(300).expand_as(keys)
    moves = plan(keys, [Round(0, 0, 300, 8, 0)])
    after = slots.scatter(-1, moves.dst, slots.gather(-1, moves.src))[..., :292]
    for head in range(2):
        gone = set(range(300)) - set(after[0, 0, head].tolist())
        assert sorted(gone) == naive_victims(keys[0, 0, head].tolist(), 8)


def kept_sets(policy: Policy, L: int = 3, H: int = 4, number: int = 4) -> Tensor:
    """int32 [L, H, K] ascending, with 60 entries to choose from: sets that differ by chance are certain."""
    slots = Slots(policy, Budget(64, 16), Protection.parse("prompt"), [4], [8], L, H, seed=3)
    slots.rounds(number)
    return slots.kept().sort(dim=-1).values


def distinct(sets: Tensor) -> int:
    return len({tuple(s) for s in sets.flatten(0, -2).tolist()})


def test_who_shares_a_draw() -> None:
    """ "head": nobody; "layer": its heads; "model": all; groups: neighbours within a layer, no others."""
    head, layer, model, groups = (
        kept_sets(p)
        for p in (RandomAttention(), RandomAttention("layer"), RandomAttention("model"), RandomAttention(groups=2))
    )
    assert distinct(head) == 12
    assert distinct(layer) == 3
    assert bool((layer == layer[:, :1]).all())
    assert distinct(model) == 1
    assert distinct(groups) == 6
    assert torch.equal(groups[:, 0], groups[:, 1])
    assert torch.equal(groups[:, 2], groups[:, 3])
    assert distinct(kept_sets(RandomAttention(groups=1))) == 3
    assert torch.equal(kept_sets(RandomAttention(groups=4)), head)  # every head its own group is the paper's rule
    assert torch.equal(kept_sets(RandomAttention(unit=1)), head)


def test_requests_layers_and_seeds_differ() -> None:
    """Never let two rows or runs share draws by accident."""
    both = Slots(RandomAttention("model"), Budget(64, 16), Protection.parse("prompt"), [4, 4, 4], [8, 9, 8])
    both.rounds(3)
    a, b, c = (set(both.kept(i).flatten().tolist()) for i in range(3))
    assert a == c != b
    other = Slots(RandomAttention("model"), Budget(64, 16), Protection.parse("prompt"), [4], [8], seed=2)
    other.rounds(3)
    assert set(other.kept().flatten().tolist()) != a
