"""Hand-made views of a round for tests of scored policies: gappy positions, slots in any order, rows of unequal fill.

``Made.heads`` has what a formula needs in float64, told by position; ``Made.view()`` shows the same to a policy.
"""

from __future__ import annotations

from collections.abc import Set
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from ..policies import Policy
from ..rotary import Rotary
from ..signals import (
    ATTENTION,
    DIGEST,
    ENTROPY,
    EVOLUTION,
    OF_LAYERS,
    QUERIES,
    ROTARY,
    VALUES,
    LayerView,
    RoundView,
)

JUNK = 10**6


@dataclass
class Entries:
    """What one KV head of one layer of one row holds, by position (all float64)."""

    keys: dict[int, np.ndarray]  # [D], after RoPE
    values: dict[int, np.ndarray]  # [D]
    cached: list[int]  # ascending
    candidates: list[int]  # ascending
    window: list[int]
    queries: np.ndarray  # [G, w, D] after RoPE, oldest first; zeros where the row is too short
    prerope: np.ndarray  # [G, w, D]
    query_positions: list[int]
    received: dict[int, float]
    entropy: dict[int, float]
    evolution: dict[int, float]
    scaling: float


@dataclass
class Made:
    """Rows of random entries.

    Args:
        lengths: tokens seen by each row.
        kept: entries a head holds before the round (fewer where the row is shorter).
        protected: first positions that are protected.
        window: newest that stay.
        w: newest queries shown.
        shared: heads (of a layer, "layer"; of all, "model"; equal heads of all layers, "head-of-all-layers") hold the
            same positions.
    """

    lengths: list[int]
    kept: int = 24
    protected: int = 3
    window: int = 4
    w: int = 5
    layers: int = 2
    heads: int = 2
    group: int = 3
    width: int = 8
    shared: str = "head"
    scaling: float | None = None
    seed: int = 0
    digest: list[torch.Tensor] | None = None  # one a layer, [R, ...]
    pending: int = 0
    heads_of: list[list[list[Entries]]] = field(init=False)  # [row][layer][head]

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.rotary = Rotary(torch.tensor([10000.0 ** (-2 * f / self.width) for f in range(self.width // 2)]).double())
        self.heads_of = []
        for length in self.lengths:
            n = min(self.kept, length)
            fixed = list(range(min(self.protected, length)))
            newest = list(range(max(len(fixed), length - self.window), length))
            pick = partial(self._positions, rng, n, fixed, newest, {})
            self.heads_of.append(
                [[self._entries(rng, pick(layer, h), fixed, newest, length) for h in range(self.heads)]
                 for layer in range(self.layers)]
            )  # fmt: skip

    def _positions(
        self,
        rng: np.random.Generator,
        n: int,
        fixed: list[int],
        newest: list[int],
        sets: dict[tuple[int, int], list[int]],
        layer: int,
        head: int,
    ) -> list[int]:
        """What a head holds: ``n`` positions, the same as every head it shares its set with."""
        same = {"head": (layer, head), "layer": (layer, 0), "model": (0, 0)}.get(self.shared, (0, head))
        if same not in sets:
            middle = np.arange(len(fixed), newest[0] if newest else len(fixed))
            chosen = rng.choice(middle, size=n - len(fixed) - len(newest), replace=False)
            sets[same] = sorted([*fixed, *map(int, chosen), *newest])
        return sets[same]

    def _entries(
        self, rng: np.random.Generator, cached: list[int], fixed: list[int], newest: list[int], length: int
    ) -> Entries:
        draw = {p: rng.normal(size=(2, self.width)).astype(np.float32).astype(np.float64) for p in cached}
        at = list(range(length - self.w, length))
        queries = (2 * rng.normal(size=(self.group, self.w, self.width))).astype(np.float32)
        queries[:, [t < 0 for t in at]] = 0
        pre = self.rotary.unrotate(torch.from_numpy(queries), torch.tensor(at).clamp(min=0))
        numbers = {p: rng.random(3).astype(np.float32).astype(np.float64) for p in cached}
        return Entries(
            keys={p: d[0] for p, d in draw.items()},
            values={p: d[1] for p, d in draw.items()},
            cached=list(cached),
            candidates=[p for p in cached if p not in fixed and p not in newest],
            window=newest,
            queries=queries.astype(np.float64),
            prerope=pre.double().numpy(),
            query_positions=at,
            received={p: float(x[0]) for p, x in numbers.items()},
            entropy={p: float(x[1]) * 5 for p, x in numbers.items()},
            evolution={p: float(x[2]) for p, x in numbers.items()},
            scaling=self.width**-0.5 if self.scaling is None else self.scaling,
        )

    def view(self, shuffle: int = 0, seed: int = 0, rounds: int = 0, rubbish: int = 0) -> RoundView:
        """The round.

        Another ``shuffle`` puts the same entries in other slots, another ``rubbish`` fills empty slots with something
        else. No score may notice either.
        """
        rng, empty = np.random.default_rng(1000 + shuffle), np.random.default_rng(9000 + rubbish)
        layers = [self._layer(i, rng, empty) for i in range(self.layers)]
        rows = len(self.lengths)
        candidates = max(len(row[0][0].candidates) for row in self.heads_of)
        one_layer, one_head = self.shared in ("model", "head-of-all-layers"), self.shared in ("model", "layer")
        positions = torch.full((rows, self.layers, self.heads, candidates), torch.iinfo(torch.int32).max).int()
        for r, row in enumerate(self.heads_of):
            for i, heads in enumerate(row):
                for h, e in enumerate(heads):
                    positions[r, i, h, : len(e.candidates)] = torch.tensor(e.candidates, dtype=torch.int32)
        positions = positions[:, :1] if one_layer else positions
        positions = positions[:, :, :1] if one_head else positions
        return RoundView(
            seed=seed,
            streams=torch.arange(rows) * 7919 + 5,
            rounds=torch.full((rows,), rounds),
            layers=torch.arange(self.layers),
            heads=torch.arange(self.heads),
            model_heads=self.heads,
            candidates=candidates,
            positions=positions,
            layer=lambda i: layers[i],
            seen=tuple(self.lengths),
            kept=tuple(len(row[0][0].cached) - 2 for row in self.heads_of),
            window=tuple(len(row[0][0].window) for row in self.heads_of),
            protected=tuple(
                len(row[0][0].cached) - len(row[0][0].candidates) - len(row[0][0].window) for row in self.heads_of
            ),
        )

    def _layer(self, i: int, rng: np.random.Generator, empty: np.random.Generator) -> LayerView:
        rows, slots = len(self.lengths), max(len(row[0][0].cached) for row in self.heads_of) + 3
        shape = (rows, self.heads, slots)
        keys, values = (
            empty.normal(size=(*shape, self.width)) * 9 for _ in range(2)
        )  # rubbish where nothing is cached
        positions = empty.integers(0, 200, size=shape)
        numbers = empty.normal(size=(*shape, 3)) * 9
        queries = np.zeros((rows, self.heads * self.group, self.w, self.width))
        count, first, last = (np.zeros(rows, dtype=int) for _ in range(3))
        for r, row in enumerate(self.heads_of):
            for h, e in enumerate(row[i]):
                line = np.array(e.cached)
                first[r], count[r] = len(line) - len(e.candidates) - len(e.window), len(line)
                last[r] = count[r] - len(e.window)
                rng.shuffle(line[first[r] : last[r]])
                positions[r, h, : count[r]] = line
                for s, p in enumerate(line):
                    keys[r, h, s], values[r, h, s] = e.keys[p], e.values[p]
                    numbers[r, h, s] = e.received[p], e.entropy[p], e.evolution[p]
                queries[r, h * self.group : (h + 1) * self.group] = e.queries
        at = torch.arange(slots)
        first_, last_, count_ = (torch.from_numpy(x)[:, None, None] for x in (first, last, count))
        filled = at < count_
        there = torch.from_numpy(positions).masked_fill(~filled, JUNK)
        order = there.argsort(dim=-1, stable=True)
        eligible = (at >= first_) & (at < last_)
        flags = eligible.expand(shape).gather(-1, order)
        places = (~flags).to(torch.uint8).argsort(dim=-1, stable=True)[..., : int((last - first).max())]
        received, entropy, evolution = torch.from_numpy(numbers).float().unbind(-1)
        return LayerView(
            keys=torch.from_numpy(keys).float(),
            positions=torch.from_numpy(positions).int(),
            filled=filled,
            window=filled & (at >= last_),
            order=order,
            places=places,
            queries=torch.from_numpy(queries).float(),
            query_positions=torch.tensor(self.lengths)[:, None] + torch.arange(-self.w, 0),
            scaling=self.scaling,
            index=i,
            values=torch.from_numpy(values).float(),
            eligible=eligible,
            rotary=self.rotary,
            digest=None if self.digest is None else self.digest[i],
            pending=self.pending,
            received=received,
            entropy=entropy,
            evolution=evolution,
        )


def declared(view: RoundView, signals: Set[str]) -> RoundView:
    """What an engine shows a policy that names these signals: those and no others."""
    if not OF_LAYERS & signals:
        return replace(view, positions=view.positions if signals else None, layer=None)
    named = {
        "values": {VALUES},
        "queries": {QUERIES},
        "query_positions": {QUERIES},
        "scaling": {QUERIES},
        "rotary": {ROTARY, DIGEST},
        "digest": {DIGEST},
        "received": {ATTENTION},
        "entropy": {ENTROPY},
        "evolution": {EVOLUTION},
    }
    hidden: dict[str, None] = {name: None for name, either in named.items() if not either & signals}
    show = view.layer
    assert show is not None
    return replace(view, layer=lambda i: replace(show(i), **hidden))  # type: ignore[arg-type]


def digests(policy: Policy, made: Made) -> None:
    """Give a round the digests that ``policy`` makes of random queries before RoPE, block by block as in an engine."""
    rng, heads = np.random.default_rng(made.seed + 17), made.heads * made.group
    prompt_block, trace_block = policy.digest_blocks
    made.digest = []
    for _ in range(made.layers):
        states = []
        for length in made.lengths:
            mean = rng.normal(size=(1, heads, 1, made.width))
            queries = torch.from_numpy(mean + rng.normal(size=(1, heads, length, made.width))).float()
            prompt = length if trace_block is None else length - length // 3 // trace_block * trace_block
            edges = [*range(0, prompt, prompt_block), *range(prompt, length, trace_block or 1), length]
            state = None
            for start, end in pairwise(edges):
                state = policy.digest(state, queries[:, :, start:end], torch.arange(start, end)[None])
            assert state is not None
            states.append(state)
        made.digest.append(torch.cat(states))


def other_contents(made: Made) -> Made:
    """The same positions, whose keys, values and numbers have changed places; other queries."""

    def turned(of: dict[int, Any]) -> dict[int, Any]:
        return dict(zip(of, reversed(list(of.values())), strict=True))

    def changed(e: Entries) -> Entries:
        names = ("keys", "values", "received", "entropy", "evolution")
        moved: dict[str, Any] = {name: turned(getattr(e, name)) for name in names}
        return replace(e, queries=-e.queries, **moved)

    other = copy(made)
    other.heads_of = [[[changed(e) for e in heads] for heads in row] for row in made.heads_of]
    return other
