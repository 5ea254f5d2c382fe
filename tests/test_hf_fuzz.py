"""Random combinations of everything at once, checked against the masked reference.

One case is a family, an attention implementation, a batch of unequal prompts that may come in two
chunks, a budget, a window, a policy, a protection, trace tokens alone and in chunks, and later turns.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import kvkeep
from masked import Rule, check_row, taped
from models import CASES, left_pad, prompt, step, tiny

# notation: share, sinks, pins
PROTECTIONS: dict[str, tuple[float, int, tuple[int, ...]]] = {
    "prompt": (1.0, 0, ()),
    "none": (0.0, 0, ()),
    "sinks:3": (0.0, 3, ()),
    "prompt:0.5": (0.5, 0, ()),
    "prompt+pin:16-18": (1.0, 0, (16, 17)),
    "sinks:2+pin:5-7": (0.0, 2, (5, 6)),
}


@dataclass
class Case:
    """What is run, and the rule it must follow."""

    family: str
    attention: str
    lengths: list[int]
    values: dict[str, Any]
    rule: Rule
    forwards: list[tuple[str, int]] = field(default_factory=list)  # prompt, trace (0: as many as fit, up to 5), turn


def draw_case(rnd: random.Random) -> Case:
    policy = rnd.choice(["random", "random", "random", "recency", "streaming"])
    unit = rnd.choice([1, 1, 1, 2, 3]) if policy == "random" else 1
    protect = rnd.choice([p for p in PROTECTIONS if unit == 1 or "pin" not in p])
    share, sinks, pins = PROTECTIONS[protect]
    scope = rnd.choice(["total", "total", "trace", "grow"])
    r = unit * rnd.randint(1, 4)
    window = rnd.choice([None, 0, unit, 2 * unit, r + unit])
    w = r if window is None else window
    lengths = [rnd.randint(1, 14) for _ in range(rnd.choice([1, 1, 2, 3]))]
    turns = [rnd.randint(1, 9) for _ in range(rnd.choice([0, 1, 2]))]
    if unit > 1 or share == 0.5 or (scope == "trace" and not share):
        turns = []
    K = unit * ((max(lengths) + w + r) // unit + rnd.randint(2, 6)) + sum(turns) * (share > 0)
    if not share and unit == 1 and rnd.random() < 0.3:
        lengths = [rnd.randint(1, 60) for _ in lengths]  # longer than K + r
    growth = rnd.choice([None, None, 2.0, 3.5]) if unit == 1 else None
    values: dict[str, Any] = {"policy": policy, "budget": K, "buffer": r, "protect": protect, "scope": scope}
    values |= {"growth": growth, "window": window, "track_positions": rnd.random() < 0.5, "seed": rnd.randint(0, 99)}
    if policy == "random":
        values |= {"draw": rnd.choice(["head", "layer", "model"]), "unit": unit}
    certain = policy != "random" and not pins
    shared = {"scope": scope, "unit": unit, "draw": values.get("draw", "head"), "newest_only": certain}
    case = Case(*rnd.choice(CASES), lengths, values, Rule(K, r, w, share, sinks, pins, growth, **shared))
    longest = max(lengths)
    cut = rnd.randint(1, longest - 1) if longest > 1 and rnd.random() < 0.3 else 0
    case.forwards = [("prompt", n) for n in (cut, longest - cut) if n]
    for turn in [*turns, 0]:
        case.forwards += [("trace", 0 if rnd.random() < 0.3 else 1) for _ in range(rnd.randint(1, 3 * r + 30))]
        case.forwards += [("turn", turn)] if turn else []
    return case


def check(case: Case) -> None:
    model, longest, rows = tiny(case.family, case.attention), max(case.lengths), len(case.lengths)
    batch = left_pad([prompt(n, seed=5) for n in case.lengths])
    ids, mask, first, turns = batch["input_ids"], batch["attention_mask"], 0, list[range]()
    with kvkeep.evict(model, **case.values) as cache, taped(model, cache) as frames:
        for kind, asked in case.forwards:
            end = first + (asked or min(cache.trace_space() or 5, 5))
            if end > ids.shape[1]:
                new = prompt(end - ids.shape[1], seed=first).expand(rows, -1)
                ids, mask = torch.cat([ids, new], dim=1), torch.cat([mask, torch.ones_like(new)], dim=1)
            if kind == "turn":
                turns.append(range(first, end))
            positions = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, first:]
            with cache.as_trace() if kind == "trace" else cache.as_prompt():
                step(model, cache, ids[:, first:end], attention_mask=mask[:, :end], position_ids=positions)
            first = end
    for i, n in enumerate(case.lengths):
        check_row(model, frames, ids[i : i + 1, longest - n :], case.rule, n, i, longest, turns)


@pytest.mark.parametrize("seed", range(16))
def test_a_few_random_cases(seed: int) -> None:
    check(draw_case(random.Random(seed)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 400))
def test_many_random_cases(seed: int) -> None:
    check(draw_case(random.Random(seed)))
