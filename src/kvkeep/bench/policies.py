"""What a round of each policy costs beside one of ``random``: time, what must be seen between rounds, memory.

Policies take turns. In a turn each runs one round, or as many as its engine plans at once, and right before it random
runs its own; a ratio is that of the two, and its median over turns is reported. Before every round the processor's
caches are swept, as a model's forwards do between rounds.

On a CPU with one thread, times are processor time: other work on the machine interrupts a round of a second, but hardly
one of a millisecond, which no ratio of wall clocks makes up for.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..evals.arms import Arm as Policy
from .common import Arm, interval, median, place, progress, record, stopwatch, threads
from .standin import PROMPT, ModelShape, StandIn

if TYPE_CHECKING:
    from rich.table import Table

BASE = "random"
#: Variants that ``all`` times in the place of a policy's bare name.
VARIANTS: dict[str, tuple[str, ...]] = {
    "triattention": ("triattention:mode=per_head", "triattention:mode=per_layer"),
    "rkv": ("rkv:variant=official",),
    "infokv": ("infokv", "infokv:adaptive=true"),
    "mix": ("mix:first=random,second=rkv",),
}
_SWEPT = 64 << 20  # bytes, more than the last level of cache of what this usually runs on
_WARM_UP = 1  # turns
_CHANGES_ROUNDS = ("buffer", "growth", "scope", "window")


def names(text: str) -> list[str]:
    """Policies joined by commas, as ``NAME`` or ``NAME:option=value,...``; ``all``: kvkeep's own that evict.

    Raises:
        ValueError: no such policy or option, or a policy that cannot be compared.
    """
    from ..policies import policies as known

    found: list[str] = []
    for piece in text.split(","):
        if found and re.match(r"[^:=]+=", piece):  # another option of the policy before
            found[-1] += f",{piece}"
        elif piece.strip() == "all":
            own = [p.name for p in known().values() if p.evicts and p.__module__.startswith("kvkeep.")]
            found += [variant for name in own for variant in VARIANTS.get(name, (name,))]
        else:
            found.append(piece.strip())
    for spec in found:
        _parse(spec)
    return list(dict.fromkeys(found))


def _parse(spec: str) -> Policy:
    policy = Policy.parse(spec)
    if not policy.evicts:
        raise ValueError(f"policy {spec!r} runs no rounds: name policies that evict")
    if policy.published or set(policy.values) & set(_CHANGES_ROUNDS):
        raise ValueError(
            f"policy {spec!r}: rounds are compared at the same budget, buffer and window: leave its own out"
        )
    return policy


class _Contestant:
    """One policy's cache, and what it measured.

    Args:
        policy: the policy.
        cache: full.
        observe: measure what is observed between rounds.
    """

    def __init__(self, policy: Policy, cache: StandIn, observe: bool) -> None:
        self.policy, self.cache = policy, cache
        self.observes = observe and cache.observes
        self.round_ms: list[float] = []
        self.layers_ms: list[float] = []  # observing, in all layers, over r tokens
        self.once_ms: list[float] = []  # observing, once for all layers, over r tokens
        self.ratios: list[float] = []
        self.both: list[float] = []
        self.extra = 0
        cache.settle()

    def turn(self, clock: Callable[[Arm], float], sweep: Callable[[], None]) -> float:
        """Mean ms of a round, over as many as are planned at once."""
        cache, rounds = self.cache, self.cache.ahead
        spent = every = once = 0.0
        for _ in range(rounds):
            sweep()
            spent += clock(cache.round)
            self.extra = max(self.extra, cache.extra_nbytes())
            if not self.observes:
                cache.trace(cache.budget.every)
                continue
            for _ in range(cache.budget.every):
                more = cache.observe(clock)
                every, once = every + more[0], once + more[1]
        self.extra = max(self.extra, cache.extra_nbytes())
        self.round_ms.append(spent / rounds)
        self.layers_ms.append(every / rounds)
        self.once_ms.append(once / rounds)
        return self.round_ms[-1]

    def forget(self) -> None:
        """Forget what warm-up measured."""
        for values in (self.round_ms, self.layers_ms, self.once_ms, self.ratios, self.both):
            values.clear()

    def row(self, observe: bool) -> dict[str, Any]:
        """What is reported."""
        cache = self.cache
        entries, layers = cache.entries_nbytes(), cache.shape.layers
        found: dict[str, Any] = {
            "policy": self.policy.label,
            "protect": self.policy.protect,
            "budget": cache.budget.total,
            "buffer": cache.budget.every,
            "batch": cache.shape.batch,
            "round_ms": median(self.round_ms),
            "round_ms_interval": interval(self.round_ms),
            "layer_ms": median(self.round_ms) / layers,
            f"over_{BASE}": median(self.ratios),
            f"over_{BASE}_interval": interval(self.ratios),
            "planned_ahead": cache.ahead,
            "turns": len(self.round_ms),
            "entries_bytes": entries,
            "extra_bytes": self.extra,
            "extra_share": self.extra / entries,
            "temporary_bytes": cache.temporary_nbytes(),
        }
        if observe:
            found |= {
                "between_ms": median([a + b for a, b in zip(self.layers_ms, self.once_ms, strict=True)]),
                "between_layers_ms": median(self.layers_ms),
                "between_once_ms": median(self.once_ms),
                f"both_over_{BASE}": median(self.both),
                f"both_over_{BASE}_interval": interval(self.both),
            }
        return found


def _alone(device: torch.device) -> bool:
    """Whether all work is this thread's."""
    return device.type == "cpu" and torch.get_num_threads() == 1


def _processor(arm: Arm) -> float:
    """Processor time of an arm in ms."""
    start = time.thread_time()
    arm()
    return (time.thread_time() - start) * 1e3


def _compare(policies: Sequence[Policy], caches: Callable[[Policy], StandIn], turns: int, observe: bool,
             device: torch.device, step: Callable[[str], None]) -> list[dict[str, Any]]:  # fmt: skip
    clock = _processor if _alone(device) else stopwatch(device)
    swept: Tensor = torch.ones(_SWEPT // 8, dtype=torch.int64, device=device)
    base = next(policy for policy in policies if policy.text == BASE)
    first = _Contestant(base, caches(base), observe)
    others = [_Contestant(policy, caches(policy), observe) for policy in policies if policy is not base]

    def sweep() -> None:
        swept.add_(1)

    for turn in range(_WARM_UP + turns):
        if turn == _WARM_UP:
            for contestant in (first, *others):
                contestant.forget()
        shift = turn % max(1, len(others))
        for other in others[shift:] + others[:shift]:
            beside, spent = first.turn(clock, sweep), other.turn(clock, sweep)
            other.ratios.append(spent / beside)
            other.both.append((spent + other.layers_ms[-1] + other.once_ms[-1]) / beside)
        if not others:
            first.turn(clock, sweep)
        step(f"batch {first.cache.shape.batch}, turn {turn + 1}")
    first.ratios = first.both = [1.0] * len(first.round_ms)
    return [contestant.row(observe) for contestant in (first, *others)]


def run(
    policies: Sequence[str],
    budgets: Sequence[int] = (2048,),
    buffer: int = 64,
    batches: Sequence[int] = (1,),
    *,
    layers: int = 4,
    heads: int = 8,
    query_heads: int = 32,
    head_dim: int = 128,
    hidden: int = 2560,
    vocabulary: int = 151_936,
    dtype: str = "bfloat16",
    turns: int = 9,
    observe: bool = True,
    device: str | None = None,
    seed: int = 0,
    torch_threads: int | None = None,
    show: bool = True,
) -> dict[str, Any]:
    """Time whole rounds of policies beside those of random.

    Args:
        policies: ``NAME`` or ``NAME:option=value,...``; random is added if it is missing.
        budgets: K, entries a head.
        buffer: r, victims a head and round.
        batches: rows of a batch.
        layers: attention layers; all of a round's work is proportional to them.
        heads: KV heads of a layer.
        query_heads: query heads of a layer.
        head_dim: numbers of a key.
        hidden: numbers of a hidden state.
        vocabulary: logits of a token.
        dtype: of the entries, queries, hidden states and logits.
        turns: timed turns.
        observe: also time what policies have to see of the r tokens between two rounds.
        device: by default the GPU if there is one.
        seed: of the draws.
        torch_threads: CPU threads of torch; None leaves them.
        show: progress bar on stderr.

    Returns:
        Environment, the shape, and ``rows``, random's first: times in ms. ``round_ms`` is a whole round in all layers:
        view, scores or draws, plan, moves, positions. Where the engine plans several rounds at once
        (``planned_ahead``) it is their mean. ``between_ms`` is what collecting signals took over ``buffer`` tokens:
        ``between_layers_ms`` in the layers, ``between_once_ms`` for all of them together (entropy). Not in it: Python's
        hooks on the model's modules. ``over_random`` and ``both_over_random`` (round and between) are medians over
        turns of the ratio to the rounds of random right before; intervals are 95% bootstrap intervals of medians.
        ``extra_bytes`` are allocated beside the entries, ``temporary_bytes`` a round's peak beyond that.
    """
    if turns < 1:
        raise ValueError(f"turns must be at least 1, got {turns}")
    if query_heads % heads:
        raise ValueError(f"{query_heads} query heads cannot share {heads} KV heads: use a multiple")
    specs = list(policies) if BASE in policies else [BASE, *policies]
    contestants = [_parse(spec) for spec in specs]
    for contestant in contestants:  # before anything runs
        for budget in budgets:
            contestant.settings(budget, buffer, seed)
    where, rows = place(device), []
    with threads(torch_threads), torch.inference_mode(), torch.random.fork_rng():
        torch.manual_seed(seed)
        with progress("bench round", len(batches) * len(budgets) * (_WARM_UP + turns), show) as step:
            for batch in batches:
                of_model = (query_heads, hidden, vocabulary)
                shape = ModelShape(layers, batch, heads, head_dim, getattr(torch, dtype), *of_model)
                for budget in budgets:

                    def cache(policy: Policy, shape: ModelShape = shape, budget: int = budget) -> StandIn:
                        return StandIn(policy.settings(budget, buffer, seed), shape, where)

                    rows += _compare(contestants, cache, turns, observe, where, step)
        sizes = {key: value for key, value in asdict(shape).items() if key not in ("batch", "dtype")}
        clock = "processor" if _alone(where) else "wall"
        return record(rows, where, seed, kind="policies", clock=clock, shape=sizes | {"dtype": dtype}, prompt=PROMPT)


def table(result: dict[str, Any]) -> Table:
    """The rows as a table; ``--json`` has all numbers."""
    from ..report.tables import table as make

    shape, rows, threads = result["shape"], result["rows"], result["threads"]
    observed = "between_ms" in rows[0]
    several = len({(row["batch"], row["budget"]) for row in rows}) > 1

    def cells(row: dict[str, Any]) -> list[object]:
        low, high = row[f"over_{BASE}_interval"]
        ratio = f"{_short(row[f'over_{BASE}'])}\n[{_short(low)},{_short(high)}]"  # a wide table must fit 80 columns
        found: list[object] = [row["policy"].replace(":", "\n ").replace(",", "\n ")]
        found += [row["batch"], row["budget"]] if several else []
        found += [_short(row["round_ms"]), _short(row["layer_ms"]), "1" if row["policy"] == BASE else ratio]
        if observed:
            found += [_short(row["between_ms"]) if row["between_ms"] else "-", _short(row[f"both_over_{BASE}"])]
        found += [f"{row['extra_bytes'] / 2**20:.2f}", f"{100 * row['extra_share']:.1f}"]
        return [*found, f"{row['temporary_bytes'] / 2**20:.1f}"]

    columns = ["policy", *(["batch", "K"] if several else []), "round", "a\nlayer", f"/{BASE}"]
    columns += ["between", "both"] if observed else []
    caption = (
        f"round: median ms of {shape['layers']} layers, {shape['heads']} KV heads, {shape['query_heads']} query heads, "
        f"d = {shape['head_dim']}, {shape['dtype']}. /{BASE}: median over turns, 95% bootstrap interval. "
        "extra: MiB beside the entries, all layers, and % of the entries' bytes. peak: MiB, of a round's temporaries."
    )
    if observed:
        caption += (
            " between: ms to collect the signals of r tokens, without Python's hooks on the model. "
            f"both: with the round, /{BASE}."
        )
    first = rows[0]
    what = f"r = {first['buffer']}" + ("" if several else f", K = {first['budget']}, batch {first['batch']}")
    title = f"A round of each policy, ms of {result['clock']} time: {what} ({result['device']}, {threads} threads)"
    return make(title, [*columns, "extra", "%", "peak"], [cells(row) for row in rows], caption=caption)


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
