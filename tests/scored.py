"""Scored policies as their formulas say, in float64 and plain loops: nothing here is kvkeep's.

Entries are told by position: ``keys[p]`` is a vector, ``queries[p]`` one vector for each query head of the KV head.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from masked import Frame, Rule, masked_logits, replay
from models import evicting_layers, tiny

Vectors = Mapping[int, np.ndarray]
NEAR = 1e-5  # gaps at the cut below this, relative to the largest score, may go either way in float32


@dataclass
class Head:
    """What one KV head holds at a round.

    Args:
        keys: of everything that was ever fed.
        queries: [G, D] each.
        cached: positions that are still held.
        window: those among them that stay in any case since they are the newest.
        newest: positions of the queries that vote, oldest first; negative ones do not exist.
    """

    keys: Vectors
    queries: Vectors
    cached: Sequence[int]
    window: Collection[int]
    newest: Sequence[int]
    scaling: float


def knorm(head: Head) -> dict[int, float]:
    return {p: -float(np.sqrt((head.keys[p] ** 2).sum())) for p in head.cached}


def keydiff(head: Head) -> dict[int, float]:
    length = {p: float(np.sqrt((head.keys[p] ** 2).sum())) for p in head.cached}
    unit = {p: head.keys[p] / (length[p] or 1.0) for p in head.cached}  # a key of zeros is unlike all others
    anchor = np.mean([unit[p] for p in head.cached], axis=0)
    return {p: -float(unit[p] @ anchor / np.sqrt((anchor**2).sum())) for p in head.cached}


def snapkv(head: Head, kernel: int = 5, pool: str = "avg", group: str = "mean") -> dict[int, float]:
    """Softmax over all that is cached; mean over queries; pooling (the window gives zeros); then the group."""
    line = sorted(head.cached)
    pooled = []
    for g in range(len(next(iter(head.queries.values())))):
        votes = dict.fromkeys(head.cached, 0.0)
        for t in head.newest:
            seen = [p for p in head.cached if p <= t]
            if t < 0 or not seen:
                continue
            logits = np.array([head.queries[t][g] @ head.keys[p] * head.scaling for p in seen])
            weights = np.exp(logits - logits.max())
            for p, weight in zip(seen, weights / weights.sum(), strict=True):
                votes[p] += float(weight) / len(head.newest)
        votes |= dict.fromkeys(head.window, 0.0)
        near = [[votes[p] for p in line[max(0, i - kernel // 2) : i + kernel // 2 + 1]] for i in range(len(line))]
        pooled.append([sum(n) / kernel if pool == "avg" else max(n) for n in near])
    columns = [[heads[i] for heads in pooled] for i in range(len(line))]
    return {p: sum(c) / len(c) if group == "mean" else max(c) for p, c in zip(line, columns, strict=True)}


#: name -> (settings of the policy, its formula); the query window of snapkv is set where it is used.
FORMULAS: dict[str, tuple[dict[str, Any], Callable[[Head], dict[int, float]]]] = {
    "knorm": ({"policy": "knorm"}, knorm),
    "keydiff": ({"policy": "keydiff"}, keydiff),
    "snapkv": ({"policy": "snapkv"}, snapkv),
    "snapkv-paper": (
        {"policy": "snapkv", "queries": 6, "kernel": 7, "pool": "max", "group": "max"},
        lambda head: snapkv(head, 7, "max", "max"),
    ),
    "snapkv-mixed": (
        {"policy": "snapkv", "queries": 3, "kernel": 3, "pool": "max"},
        lambda head: snapkv(head, 3, "max", "mean"),
    ),
    "snapkv-loud": (
        {"policy": "snapkv", "queries": 1, "group": "max"},
        lambda head: snapkv(head, 5, "avg", "max"),
    ),
    "snapkv-plain": ({"policy": "snapkv", "queries": 40, "kernel": 1}, lambda head: snapkv(head, 1)),
}


@dataclass
class Count:
    """Rounds of a head that were compared, and those where the cut was a near tie."""

    rounds: int = 0
    near: int = 0
    worst: list[float] = field(default_factory=list)

    def compare(self, gone: set[int], scores: Mapping[int, float], candidates: Collection[int]) -> None:
        """Assert that ``gone`` are the candidates of lowest score, ties to the older one."""
        assert gone <= set(candidates), "only candidates go"
        self.rounds += 1
        order = sorted(candidates, key=lambda p: (scores[p], p))
        expected = set(order[: len(gone)])
        if gone == expected:
            return
        cut, size = scores[order[len(gone) - 1]], max(abs(scores[p]) for p in candidates)
        gaps = [abs(scores[p] - cut) / size for p in gone ^ expected]
        assert max(gaps) < NEAR, f"{sorted(gone)} went, not {sorted(expected)}: {max(gaps):.2g} from the cut"
        self.near += 1
        self.worst.append(max(gaps))


# ---- end to end ---------------------------------------------------------------------------------


@contextmanager
def recorded(monkeypatch: Any, model: Any) -> Any:
    """Queries, keys and scaling of each evicting layer of an eager model: [heads, T, D] in float64, by layer."""
    found: dict[int, tuple[np.ndarray, np.ndarray, float]] = {}
    names = vars(sys.modules[type(model).__module__])
    original = names["eager_attention_forward"]

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **values: Any) -> Any:
        q, k = (t[0].double().numpy() for t in (query, key))
        found[module.layer_idx] = (q, k, scaling)
        return original(module, query, key, value, mask, scaling=scaling, **values)

    with monkeypatch.context() as patch:
        patch.setitem(names, "eager_attention_forward", attend)
        yield found


def check_scored(
    monkeypatch: Any,
    family: str,
    frames: Sequence[Frame],
    ids: Tensor,
    rule: Rule,
    prompt: int,
    score: Callable[[Head], dict[int, float]],
    queries: int,
    row: int = 0,
    columns: int | None = None,
    turns: Sequence[range] = (),
) -> Count:
    """Every round of a row, head by head, against the formula.

    Keys and queries come from a forward of the eager model without any cache, in which each head sees what its kept
    sets say it saw.

    Args:
        ids: [1, T] without padding.
        queries: how many queries vote.
        columns: of the first prompt, padding included.
        turns: columns of later turns.
    """
    visible, _ = replay(frames, rule, prompt, row, columns, turns)
    model = tiny(family, "eager")
    with recorded(monkeypatch, model) as found:
        masked_logits(model, ids[:, : visible.shape[-1]], visible)
    pads, count, seen, since = (columns or prompt) - prompt, Count(), 0, prompt
    prefix = set(range(max(int(np.ceil(rule.share * prompt)), min(rule.sinks, prompt))))
    held: list[list[set[int]]] = []
    for i, frame in enumerate(frames):
        kept = [[set(head) for head in layer] for layer in frame.kept[row].tolist()]
        turn = any(sum(f.columns for f in frames[:i]) in t for t in turns)
        new = range(seen, seen + frame.columns - (pads if i == 0 else 0))
        window = min(rule.w, since) if turn else rule.w
        for number, layer in enumerate(evicting_layers(model)) if i else ():
            q, k, scaling = found[layer]
            for h, before in enumerate(held[number]):
                gone = before - kept[number][h]
                if not gone:
                    continue
                free = sorted(before - prefix)
                newest = free[len(free) - window :]
                group = len(q) // len(k)
                head = Head(
                    dict(enumerate(k[h])),
                    dict(enumerate(q[h * group : (h + 1) * group].swapaxes(0, 1))),
                    sorted(before),
                    set(newest),
                    range(seen - queries, seen),
                    scaling,
                )
                count.compare(gone, score(head), free[: len(free) - window])
        rounds = bool(held) and any(a - b for x, y in zip(held, kept, strict=True) for a, b in zip(x, y, strict=True))
        if turn and rule.share:
            prefix |= set(new)
            since = window
        else:
            since = (max(0, rule.w - rule.r) if rounds else since) + len(new)
        held, seen = kept, seen + len(new)
    return count
