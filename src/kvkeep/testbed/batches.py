"""Training batches of abacus: problems of like length, random position gaps, KV dropout."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .tasks import Kind, Spec, draw_problem
from .vocab import IDS, MODES, PAD, encode, encode_chat

_POOL = 64  # problems drawn at a time, so that batches can be cut from problems of like length
_NEWEST = 16  # no key is dropped earlier than this after it was written
_LONGEST_LIFE = 2048
_FARTHEST = 2048  # largest position that gaps may reach
_OPENERS = frozenset(i for word, i in IDS.items() if word[0] == "#" or word in ("recap", "note", "?", "*", "</think>"))


@dataclass(frozen=True)
class Batch:
    """Padded on the right; B rows of T tokens.

    Attributes:
        ids: int64 [B, T].
        positions: int64 [B, T], with gaps.
        targets: int64 [B, T]: the next token, or -100 where it carries no loss.
        kinds: uint8 [B, T]: :class:`Kind` of the target.
        prompts: tokens of each row's prompt.
    """

    ids: Tensor
    positions: Tensor
    targets: Tensor
    kinds: Tensor
    prompts: list[int]

    @property
    def tokens(self) -> int:
        """Tokens without padding."""
        return int((self.ids != IDS[PAD]).sum())


def batches(seed: int, phase: int, largest: int, tokens: int) -> Iterator[Batch]:
    """Batches without end: a pure function of the arguments.

    Args:
        seed: of the training run.
        phase: what sets two streams of one run apart (the curriculum's level).
        largest: lines of a problem at most.
        tokens: of a batch at most, padding included.
    """
    for number in range(2**62):
        yield from pool(seed, phase, number, largest, tokens)


def pool(seed: int, phase: int, number: int, largest: int, tokens: int) -> list[Batch]:
    """The batches cut from one pool of problems."""
    rng = random.Random(f"abacus-train-{seed}-{phase}-{number}")
    rows = sorted((_row(rng, largest) for _ in range(_POOL)), key=lambda row: len(row[0]))
    found, begin = [], 0
    for end in range(1, len(rows) + 1):
        if end == len(rows) or (end + 1 - begin) * len(rows[end][0]) > tokens:
            found.append(_collate(rows[begin:end]))
            begin = end
    rng.shuffle(found)
    return found


def _row(rng: random.Random, largest: int) -> tuple[list[int], list[int], list[int], int]:
    """Ids, positions, kinds and prompt length of one drawn problem."""
    n = rng.randint(3, largest)
    note = rng.randint(1, n) if rng.random() < 0.4 else None
    asked: list[str | int] = [] if note is None or rng.random() < 0.2 else ["passcode"]
    asked += [rng.randint(1, n) for _ in range(rng.choice((0, 0, 1, 2)))]
    rng.shuffle(asked)
    distractors = rng.choice((0, 0, 0, 1, 2, 3))
    problem = draw_problem(Spec(n, rng.choice(MODES), distractors, note, tuple(asked)), rng)
    prompt = encode_chat(problem.prompt)
    solution = problem.solution()
    ids = prompt + encode(" ".join(word for word, _ in solution))
    kinds = [int(Kind.GIVEN)] * len(prompt) + [int(kind) for _, kind in solution]
    return ids, _positions(rng, ids), kinds, len(prompt)


def _positions(rng: random.Random, ids: list[int]) -> list[int]:
    """Positions with random gaps where a line begins, in half of the rows."""
    if rng.random() < 0.5:
        return list(range(len(ids)))
    starts = sum(token in _OPENERS for token in ids)
    mean = rng.random() * max(0, min(3 * len(ids), _FARTHEST - len(ids))) / max(1, starts)
    found, at = [], 0
    for token in ids:
        if token in _OPENERS:
            at += int(rng.random() * 2 * mean)
        found.append(at)
        at += 1
    return found


def _collate(rows: list[tuple[list[int], list[int], list[int], int]]) -> Batch:
    width = max(len(row[0]) for row in rows)

    def padded(i: int, fill: int) -> Tensor:
        return torch.tensor([row[i] + [fill] * (width - len(row[0])) for row in rows])  # type: ignore[operator]

    ids, kinds = padded(0, IDS[PAD]), padded(2, 0)
    kinds = torch.cat([kinds[:, 1:], torch.zeros_like(kinds[:, :1])], dim=1)
    following = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], dim=1)
    targets = torch.where(kinds > 0, following, torch.full_like(following, -100))
    return Batch(ids, padded(1, 0), targets, kinds.to(torch.uint8), [row[3] for row in rows])


def lifetimes(batch: Batch, layers: int, kv_heads: int, exempt_prompt: bool, generator: torch.Generator) -> Tensor:
    """KV dropout: the last query that sees each key, int32 [L, B, H_kv, T].

    An entry of one KV head dies at an exponential age, as under random eviction. Each row has its own mean age,
    log-uniform between 16 and 2,048 tokens.

    Args:
        batch: the batch.
        layers: L.
        kv_heads: H_kv.
        exempt_prompt: the prompt's entries never die.
        generator: of the draws.
    """
    rows, width = batch.ids.shape
    low, high = math.log(_NEWEST), math.log(_LONGEST_LIFE)
    mean = (low + (high - low) * torch.rand(rows, generator=generator)).exp()
    ages = torch.empty(layers, rows, kv_heads, width).exponential_(generator=generator) * mean[:, None, None]
    if exempt_prompt:
        prompts = torch.tensor(batch.prompts)[:, None]
        ages.masked_fill_((torch.arange(width) < prompts)[None, :, None], 2 * width)
    return (ages.clamp(_NEWEST, 2**20).to(torch.int32) + torch.arange(width, dtype=torch.int32)).contiguous()
