"""What the tests compare kvkeep with: a naive rule, a naive plan, and a slot simulator.

The naive parts use Python lists and numpy only, and nothing of kvkeep's planning. :class:`Slots`
moves an int32 tensor of positions with the real :class:`Row`, policy and plan, exactly as an engine
moves keys and values, so that a test can read what every slot of every head holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from kvkeep.budget import Budget
from kvkeep.layout import Round, Row
from kvkeep.plan import Moves, Overrides, plan
from kvkeep.policies import Policy
from kvkeep.protection import Protection
from kvkeep.signals import POSITIONS, RoundView


def naive_kept(
    rng: np.random.Generator,
    K: int,
    r: int,
    w: int,
    protected: int,
    prompt: int,
    rounds: int,
    score: Callable[[int], float] | None = None,
) -> list[int]:
    """Positions one head keeps after ``rounds`` rounds, from the paper's rule as it is written.

    Every cached position scores Uniform(0, 1), the protected prompt and the newest w score infinity,
    the K highest stay. ``score`` replaces the uniform draw (to show that a test can fail).
    """
    cached, token = list(range(prompt)), prompt
    for _ in range(rounds):
        while len(cached) < K + r:
            cached.append(token)
            token += 1
        newest = set(cached[len(cached) - w :])
        scores = {p: float(rng.random()) if score is None else float(rng.random()) + score(p) for p in cached}
        scores |= {p: np.inf for p in cached if p < protected or p in newest}
        cached = sorted(sorted(cached, key=lambda p: scores[p])[len(cached) - K :])
    return cached


def naive_victims(keys: Sequence[float], count: int, ranks: Sequence[int] | None = None) -> list[int]:
    """Ranks with the ``count`` lowest keys; equal keys go by column."""
    columns = sorted(range(len(keys)), key=lambda c: (keys[c], c))[:count]
    return sorted(columns if ranks is None else [ranks[c] for c in columns])


def naive_event(slots: list[int], event: Round, victims: Sequence[int]) -> list[int]:
    """One head's slots after a round or the room made for a turn: i-th survivor to i-th victim."""
    before, after = list(slots), list(slots)
    behind = event.candidates + event.newest
    total = behind + event.fresh
    holes = [*victims, *range(behind, total)]
    freed = range(event.freed) if event.turn else range(total - event.freed, total)
    for i in range(event.window):
        after[event.window_to + i] = before[event.window_from + i]
    survivors = [c for c in freed if c not in holes]
    targets = [c for c in holes if c not in freed]
    assert len(survivors) == len(targets)
    for source, target in zip(survivors, targets, strict=True):
        after[event.start + target] = before[event.start + source]
    return after


@dataclass
class Slots:
    """Positions in slots [R, L, H, S], moved by the real code.

    Args:
        prompts: prompt length of each row.
        streams: stream of each row.
        watch: called after each event batch with (self, indices of the rows, events, keys, ranks, moves, before).
        masks: positions -> overrides, called with the candidates' positions [R, L, H, C].
    """

    policy: Policy
    budget: Budget | None
    protection: Protection
    prompts: Sequence[int]
    streams: Sequence[int]
    L: int = 1
    H: int = 1
    seed: int = 0
    size: int = 0
    watch: Callable[..., None] | None = None
    masks: Callable[[Tensor], Overrides] | None = None
    rows: list[Row] = field(init=False)
    pos: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.rows = [Row.new(self.budget, self.protection, self.policy.slots_per_unit) for _ in self.prompts]
        for row, n in zip(self.rows, self.prompts, strict=True):
            row.add_prompt(n)
        if not self.size:
            limits = [row.cached if row.limit is None else max(row.limit, row.cached) for row in self.rows]
            self.size = max(limits) + 256
        self.pos = torch.full((len(self.rows), self.L, self.H, self.size), -1, dtype=torch.int32)
        for i, n in enumerate(self.prompts):
            self.pos[i, :, :, :n] = torch.arange(n, dtype=torch.int32)

    def event(self, events: dict[int, Round]) -> None:
        """Carry out one event for each of these rows, all in one plan."""
        which, todo = list(events), list(events.values())
        old = self.pos.clone()
        unit = self.policy.slots_per_unit
        keys, ranks, masks = self._keys(which, todo)
        moves = plan(keys, todo, unit, overrides=masks, ranks=ranks)
        for i, event in zip(which, todo, strict=True):  # a turn moves the window out of the way first
            if event.turn:
                self._window(i, event)
        rows = torch.tensor(which)
        part = self.pos[rows]
        src, dst = (x.expand(len(which), self.L, self.H, -1) for x in (moves.src, moves.dst))
        self.pos[rows] = part.scatter(-1, dst, part.gather(-1, src))
        for i, event in zip(which, todo, strict=True):
            if not event.turn:
                self._window(i, event)
            self.rows[i].apply(event)
        if self.watch is not None:
            self.watch(self, which, todo, keys, ranks, moves, old)

    def _window(self, i: int, e: Round) -> None:
        moved = self.pos[i, :, :, e.window_from : e.window_from + e.window].clone()
        self.pos[i, :, :, e.window_to : e.window_to + e.window] = moved

    def _keys(self, which: list[int], events: list[Round]) -> tuple[Tensor, Tensor | None, Overrides | None]:
        width = max(e.candidates for e in events)
        at = torch.full((len(which), self.L, self.H, width), torch.iinfo(torch.int32).max, dtype=torch.int32)
        for j, (i, e) in enumerate(zip(which, events, strict=True)):
            at[j, :, :, : e.candidates] = self.pos[i, :, :, e.start : e.start + e.candidates]
        ranks = positions = None
        if POSITIONS in self.policy.signals:
            at = at[:, : 1 if self.policy.scope == "model" else None, : None if self.policy.scope == "head" else 1]
            positions, ranks = at.sort(dim=-1)  # padding sorts behind
            at = positions
        view = RoundView(
            seed=self.seed,
            streams=torch.tensor([self.streams[i] for i in which], dtype=torch.int64),
            rounds=torch.tensor([e.number for e in events], dtype=torch.int64),
            layers=torch.arange(self.L),
            heads=torch.arange(self.H),
            model_heads=self.H,
            candidates=width,
            positions=positions,
        )
        return self.policy.keys(view), ranks, None if self.masks is None else self.masks(at)

    def room(self) -> None:
        """Run the rounds that are due."""
        due = {i: row.next_round() for i, row in enumerate(self.rows) if row.needs_round()}
        if due:
            self.event(due)

    def trace(self, n: int = 1) -> None:
        """Cache n more trace tokens in every row, one at a time, with the rounds that fall due."""
        for _ in range(n):
            self.room()
            for i, row in enumerate(self.rows):
                self.pos[i, :, :, row.cached] = row.seen
                row.add_trace(1)

    def rounds(self, n: int) -> None:
        """Go on until every row (of equal prompts) has just run n more rounds."""
        goal = self.rows[0].trace_rounds + n
        while self.rows[0].trace_rounds < goal:
            for i, row in enumerate(self.rows):
                step = 0 if row.needs_round() else row.space() or 0
                self.pos[i, :, :, row.cached : row.cached + step] = torch.arange(row.seen, row.seen + step)
                row.add_trace(step)
            due = self.rows[0].needs_round()
            self.room()
            assert due, "a full row must need a round"

    def turn(self, sizes: dict[int, int]) -> None:
        """A new turn of n prompt tokens in some of the rows, planned together with rounds due in the others."""
        events = {i: self.rows[i].next_turn(n) for i, n in sizes.items()}
        events |= {i: r.next_round() for i, r in enumerate(self.rows) if i not in sizes and r.needs_round()}
        todo = {i: e for i, e in events.items() if e is not None}
        if todo:
            self.event(todo)
        for i, n in sizes.items():
            row = self.rows[i]
            first, seen = row.turn_slot, row.seen
            self.pos[i, :, :, first : first + n] = torch.arange(seen, seen + n, dtype=torch.int32)
            row.add_turn(n)

    def kept(self, i: int = 0) -> Tensor:
        """int32 [L, H, cached]: what the slots of row i hold, in slot order."""
        return self.pos[i, :, :, : self.rows[i].cached]


def simulate(
    policy: Policy,
    budget: Budget,
    protection: Protection,
    prompt: int,
    rounds: int,
    stream: int = 1,
    L: int = 1,
    H: int = 1,
    seed: int = 0,
) -> Tensor:
    """Positions kept right after the last of ``rounds`` rounds, int32 [L, H, K], ascending."""
    slots = Slots(policy, budget, protection, [prompt], [stream], L, H, seed)
    slots.rounds(rounds)
    return slots.kept().sort(dim=-1).values


def indicators(kept: np.ndarray, length: int) -> np.ndarray:
    """float64 [N, length]: 1 where a head (row of ``kept`` [N, K]) still holds a position."""
    held = np.zeros((len(kept), length))
    np.put_along_axis(held, kept.astype(np.int64), 1.0, axis=1)
    return held


def pairs(held: np.ndarray) -> np.ndarray:
    """[N, T (T - 1) / 2]: 1 where a head holds both positions of a pair."""
    first, second = np.triu_indices(held.shape[1], 1)
    return held[:, first] * held[:, second]


def same_mean(a: np.ndarray, b: np.ndarray) -> float:
    """p-value that the rows of a [N, D] and b [M, D] have the same mean (Hotelling's two-sample T2).

    Kept sets have a fixed size, so indicators depend on each other; their covariance is estimated.
    """
    n, m = len(a), len(b)
    delta = a.mean(0) - b.mean(0)
    pooled = ((n - 1) * np.cov(a, rowvar=False) + (m - 1) * np.cov(b, rowvar=False)) / (n + m - 2)
    values, vectors = np.linalg.eigh(pooled)
    real = values > 1e-9 * values.max()
    # What never varies must agree exactly; T2 would not look there.
    if not np.allclose(vectors[:, ~real].T @ delta, 0, atol=1e-9):
        return 0.0
    dims = int(real.sum())
    t2 = n * m / (n + m) * float(((vectors[:, real].T @ delta) ** 2 / values[real]).sum())
    return float(stats.f.sf(t2 * (n + m - dims - 1) / ((n + m - 2) * dims), dims, n + m - dims - 1))


def uniform_inclusion(counts: np.ndarray, draws: int, victims: int) -> float:
    """p-value that ``draws`` uniform victims-subsets gave these inclusion counts [C] (chi-square).

    Draws without replacement vary less than a multinomial: each indicator has variance p (1 - p), and
    they sum to a constant, so the statistic is chi-square with C - 1 degrees after division by
    (1 - p) C / (C - 1).
    """
    c = len(counts)
    p = victims / c
    statistic = float(((counts - draws * p) ** 2 / (draws * p)).sum()) / ((1 - p) * c / (c - 1))
    return float(stats.chi2.sf(statistic, c - 1))


def overlap_is_hypergeometric(a: np.ndarray, b: np.ndarray) -> float:
    """p-value that victim sets a and b (bool [N, C], same size each) are independent, from their overlaps."""
    n, c = a.shape
    v, u = int(a[0].sum()), int(b[0].sum())
    overlaps = (a & b).sum(1)
    k = np.arange(max(0, v + u - c), min(v, u) + 1)
    expected = stats.hypergeom.pmf(k, c, v, u) * n
    observed = np.array([(overlaps == x).sum() for x in k], dtype=float)
    while len(expected) > 2 and expected[-1] < 5:  # merge thin tails
        expected, observed = (
            np.append(expected[:-2], expected[-2:].sum()),
            np.append(observed[:-2], observed[-2:].sum()),
        )
    while len(expected) > 2 and expected[0] < 5:
        expected, observed = np.append(expected[:2].sum(), expected[2:]), np.append(observed[:2].sum(), observed[2:])
    return float(stats.chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1))


def joint_inclusion(a: np.ndarray, b: np.ndarray) -> float:
    """p-value that candidate i in a and candidate j in b are victims together p^2 of the time, all (i, j).

    Max over C^2 standardised joint counts, Bonferroni-corrected: sees a fixed shift or permutation
    between two draws that leaves the overlap alone.
    """
    n, c = a.shape
    p2 = (a[0].sum() / c) * (b[0].sum() / c)
    joint = a.astype(np.float64).T @ b.astype(np.float64)
    tail = stats.binom.sf(joint - 1, n, p2), stats.binom.cdf(joint, n, p2)
    return float(min(1.0, 2 * joint.size * min(t.min() for t in tail)))


def victims_of(keys: Tensor, count: int) -> np.ndarray:
    """bool [N, C]: the ``count`` lowest keys of each row of int32 [N, C]."""
    lowest = keys.topk(count, dim=-1, largest=False).indices
    return torch.zeros(keys.shape, dtype=torch.bool).scatter_(-1, lowest, True).numpy()


def real_moves(moves: Moves, row: int, layer: int = 0, head: int = 0) -> dict[int, int]:
    """dst -> src of the moves of a head that move something."""
    src, dst = (x[row, layer, head].tolist() for x in (moves.src.expand_as(moves.dst), moves.dst))
    return {d: s for s, d in zip(src, dst, strict=True) if s != d}
