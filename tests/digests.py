"""Past queries of made-up rounds, and the digests that a policy makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
import torch

from kvkeep.policies import Policy
from kvkeep.rotary import Rotary
from kvkeep.testing import Entries, Made

LONG = 0.7  # scaling of a rotary that does not leave lengths as they are


def yarn(width: int, pairs: int | None = None) -> Rotary:
    """A rotary with a scaling, that may leave components alone."""
    pairs = width // 2 if pairs is None else pairs
    return Rotary(torch.tensor([100.0 ** (-f / pairs) for f in range(pairs)], dtype=torch.float64), LONG)


def rotating(monkeypatch: pytest.MonkeyPatch, rotary: Callable[[int], Rotary]) -> None:
    """Made-up rounds of heads of a width rotate like this from now on."""
    made = Made.__post_init__

    def after(self: Made) -> None:
        made(self)
        self.rotary = rotary(self.width)

    monkeypatch.setattr(Made, "__post_init__", after)


def unrotated(x: np.ndarray, position: int, rotary: Rotary) -> np.ndarray:
    """In float64, a pair at a time."""
    out, pairs = x.copy(), rotary.pairs
    for f in range(pairs):
        turned = complex(x[f], x[f + pairs]) * np.exp(-1j * position * float(rotary.inv_freq[f])) / rotary.scaling
        out[f], out[f + pairs] = turned.real, turned.imag
    return out


@dataclass
class Past:
    """Queries before RoPE of every position, by row length: ``of[length][layer][query head]`` is [T, D].

    Call it with a round, before it is shown: it sets the round's digests to what ``policy`` makes of all but the newest
    ``pending`` queries.
    """

    policy: Policy
    pending: int = 0
    blocks: tuple[int, int | None] | None = None
    of: dict[int, list[list[np.ndarray]]] = field(default_factory=dict)

    def prompt(self, length: int) -> int:
        """Tokens of the prompt of a row; about a third of the digested ones are full blocks of the trace."""
        done, block = length - self.pending, self._blocks()[1]
        return done if block is None else done - done // 3 // block * block

    def _blocks(self) -> tuple[int, int | None]:
        return self.blocks or self.policy.digest_blocks

    def __call__(self, made: Made) -> None:
        rng = np.random.default_rng(made.seed + 17)
        made.pending = min(self.pending, made.w)
        self.of = {}
        for length, row in zip(made.lengths, made.heads_of, strict=True):
            self.of[length] = [self._layer(rng, heads, length, made) for heads in row]
        made.digest = []
        for i in range(made.layers):
            states = [self._digest(np.stack(self.of[n][i]), n - made.pending) for n in made.lengths]
            made.digest.append(torch.cat(states))

    def _layer(self, rng: np.random.Generator, heads: Sequence[Entries], length: int, made: Made) -> list[np.ndarray]:
        found = []
        for e in heads:
            for queries in e.queries:
                mean, mix = rng.normal(size=made.width), rng.normal(size=(made.width, made.width)) / 2
                past = (mean + rng.normal(size=(length, made.width)) @ mix).astype(np.float32).astype(np.float64)
                for j, t in enumerate(e.query_positions):
                    if t >= length - made.pending and t >= 0:
                        past[t] = unrotated(queries[j], t, made.rotary)
                found.append(past)
        return found

    def _digest(self, queries: np.ndarray, length: int) -> torch.Tensor:
        """Prompt blocks, then trace blocks; [1, ...] of queries [H_q, T, D]."""
        prompt_block, trace_block = self._blocks()
        state, prompt = None, self.prompt(length + self.pending)
        edges = [*range(0, prompt, prompt_block), prompt]
        if trace_block is not None:
            edges += range(prompt + trace_block, length + 1, trace_block)
        for start, end in pairwise(edges):
            block = torch.from_numpy(queries[None, :, start:end]).float()
            state = self.policy.digest(state, block, torch.arange(start, end)[None])
        assert state is not None
        return state
