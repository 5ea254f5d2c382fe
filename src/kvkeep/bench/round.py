"""What a round costs: draw, plan and move apart, beside a compaction and beside a plain copy.

All arms take turns in one run. *Compaction* is what the published code does: gather the K kept
entries of every head, keys and values. Here it is as cheap as it can be: one batched gather a tensor
by flat index into memory that exists already, which then becomes the cache. The *floor* is one
contiguous copy of as many bytes as the moves move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..hf.layer import EvictingLayer
from ..hf.model import ModelInfo
from ..hf.rounds import Rounds
from ..hf.watch import Watch
from ..layout import Round, Row
from ..plan import Moves, eviction_order
from ..settings import Settings
from ..signals import POSITIONS, RoundView
from .common import Arm, alternate, median, place, progress, record, threads

if TYPE_CHECKING:
    from rich.table import Table

PROMPT = 64  # protected tokens, fewer if the budget is small


@dataclass(frozen=True)
class Shape:
    """Entries of a cache: L layers, B rows, H KV heads, D numbers a key."""

    layers: int = 4
    batch: int = 1
    heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16


class InPlace:
    """Rounds on storage without a model: the engine's own code, on random entries.

    Args:
        settings: policy, budget, buffer, seed.
        shape: of the cache.
        device: where it lies.
    """

    def __init__(self, settings: Settings, shape: Shape, device: torch.device) -> None:
        budget, policy = settings.make_budget(), settings.make_policy()
        if budget is None:
            raise ValueError(f"policy {settings.policy!r} runs no rounds: time one that evicts")
        if policy.signals - {POSITIONS}:
            unseen = ", ".join(sorted(policy.signals - {POSITIONS}))
            raise ValueError(
                f"policy {settings.policy!r} needs {unseen} of a model: time it with `kvkeep bench decode`"
            )
        self.shape, self.device = shape, device
        self.row = Row.new(budget, settings.protection, policy.slots_per_unit)
        self.row.add_prompt(min(PROMPT, (budget.total - budget.window) // 2))
        self.row.add_trace(self.row.space() or 0)
        self.layers = [EvictingLayer(i, shape.heads, lambda: None, lambda: 0) for i in range(shape.layers)]
        for layer in self.layers:
            size = (shape.batch, shape.heads, self.row.cached, shape.head_dim)
            layer.k, layer.v = (torch.randn(size, device=device).to(shape.dtype) for _ in range(2))
        info = ModelInfo(nn.Module(), {}, [*self.layers], tuple(range(shape.layers)), shape.heads, None, None)
        watch = Watch(policy, info, self.layers, budget, None)
        self.rounds = Rounds(policy, settings, info, self.layers, watch)
        self.rounds.begin(shape.batch, device)
        self.which = list(range(shape.batch))
        self.streams = torch.arange(shape.batch)
        self.keys: Tensor
        self.moves: Moves
        self.view: RoundView
        self.order: Tensor | None
        self.begin(0)

    def begin(self, number: int) -> None:
        """Make ready for round ``number`` of a full cache."""
        self.events: list[Round] = [replace(self.row.next_round(), number=number)] * self.shape.batch
        #: Rounds that the engine draws and plans at once; :meth:`draw` and :meth:`plan` do as many.
        self.ahead = self.rounds.ahead(self.events)
        store = self.rounds.store
        if store is not None:
            store.resize(self.row.cached)
            for i in self.which:
                store.filled[i] = 0
                store.fill(i, self.row.cached, self.row.cached)

    def draw(self) -> None:
        """What the policy sees, and its draws or scores."""
        coming = [replace(e, number=e.number + i) for i in range(self.ahead) for e in self.events]
        which, streams = self.which * self.ahead, self.streams.repeat(self.ahead)
        self.view, self.order = self.rounds.look(which, coming, streams, self.rounds.store)
        self.keys = self.rounds.policy.keys(self.view)

    def plan(self) -> None:
        """Victims and moves."""
        which, events, store = self.which * self.ahead, self.events * self.ahead, self.rounds.store
        moves = self.rounds.plan(which, events, self.view, self.order, self.keys, store)
        self.moves = Moves(moves.src[: self.shape.batch], moves.dst[: self.shape.batch], moves.run)

    def move(self) -> None:
        """The moves and the window, in every layer."""
        self.rounds.move(self.which, self.events, self.moves)

    def moved_bytes(self) -> int:
        """Bytes of the entries that the last plan moves, in all layers, the window included."""
        shape = self.shape
        everyone = shape.batch * shape.layers * shape.heads
        moving = (self.moves.src != self.moves.dst).expand(-1, shape.layers, shape.heads, -1).sum()
        size = 2 * shape.head_dim * shape.dtype.itemsize
        return (int(moving) + everyone * self.events[0].window) * size


class Compaction:
    """The same rounds, compacted as published: gather what stays, in slot order.

    Args:
        cache: whose entries are gathered; the memory of its tensors takes turns with one spare tensor.
    """

    def __init__(self, cache: InPlace) -> None:
        self.cache = cache
        first = cache.layers[0].k
        assert first is not None
        self.spare = torch.empty_like(first)
        self.kept = cache.row.cached - cache.events[0].victims
        self.index: Tensor  # int64 [L, B, H, K], slots

    def choose(self) -> None:
        """Slots that stay, ascending, from the same draws."""
        cache, event = self.cache, self.cache.events[0]
        unit = cache.rounds.policy.slots_per_unit
        order = eviction_order(cache.keys[: cache.shape.batch], [event.candidates // unit] * cache.shape.batch)
        victims = order.topk(event.victims // unit, dim=-1, largest=False, sorted=False).indices
        if cache.order is not None:
            victims = cache.order.gather(-1, victims)
        if unit > 1:
            victims = (victims.unsqueeze(-1) * unit + torch.arange(unit, device=victims.device)).flatten(-2)
        stays = torch.ones((*victims.shape[:-1], cache.row.cached), dtype=torch.int8, device=victims.device)
        stays.scatter_(-1, victims + event.start, 0)
        # A stable sort by "stays" puts the kept slots first, in order, without asking how many there are.
        index = stays.sort(dim=-1, descending=True, stable=True).indices[..., : self.kept]
        self.index = index.transpose(0, 1).expand(cache.shape.layers, cache.shape.batch, cache.shape.heads, -1)

    def flatten(self) -> None:
        """The index of :meth:`choose` for tensors flattened to rows (untimed)."""
        shape = self.cache.shape
        head = torch.arange(shape.batch * shape.heads, device=self.index.device).view(shape.batch, shape.heads, 1)
        self.flat = (head * self.cache.row.cached + self.index).reshape(shape.layers, -1)

    def _out(self) -> Tensor:
        shape = self.cache.shape
        rows = shape.batch * shape.heads * self.kept
        return self.spare.view(-1)[: rows * shape.head_dim].view(rows, shape.head_dim)

    def index_select(self) -> None:
        """Gather by flat index."""
        for number, layer in enumerate(self.cache.layers):
            for name in ("k", "v"):
                tensor = getattr(layer, name)
                rows, out = tensor.view(-1, tensor.shape[-1]), self._out()
                if rows.shape[-1] * rows.element_size() % 8 == 0:  # fewer, wider elements
                    rows, out = rows.view(torch.int64), out.view(torch.int64)
                torch.index_select(rows, 0, self.flat[number], out=out)
                setattr(layer, name, self.spare)
                self.spare = tensor

    def gather(self) -> None:
        """``torch.gather`` along the slots, as the published code calls it."""
        for number, layer in enumerate(self.cache.layers):
            index = self.index[number].unsqueeze(-1).expand(-1, -1, -1, self.cache.shape.head_dim)
            for name in ("k", "v"):
                tensor = getattr(layer, name)
                torch.gather(tensor, 2, index, out=self._out().view(index.shape))
                setattr(layer, name, self.spare)
                self.spare = tensor


def _time(settings: Settings, shape: Shape, device: torch.device, repeats: int) -> dict[str, Any]:
    cache = InPlace(settings, shape, device)
    compaction = Compaction(cache)
    cache.draw()
    cache.plan()
    moved = cache.moved_bytes()
    source, target = (torch.ones(moved, dtype=torch.uint8, device=device) for _ in range(2))
    # torch.gather takes many times longer than index_select on a CPU; on a GPU either may win.
    gathers: dict[str, Arm] = {"index_select": compaction.index_select}
    if device.type == "cuda":
        gathers["gather"] = compaction.gather
    arms: dict[str, Arm] = {"draw": cache.draw, "plan": cache.plan, "move": cache.move, "choose": compaction.choose}
    compaction.choose()
    compaction.flatten()
    times = alternate(arms | gathers | {"floor": lambda: target.copy_(source)}, repeats, device, before=cache.begin)
    for name in ("draw", "plan"):
        times[name] = [spent / cache.ahead for spent in times[name]]
    ms = {name: median(values) for name, values in times.items()}
    fastest = min(gathers, key=lambda name: ms[name])
    whole = median([sum(parts) for parts in zip(times["draw"], times["plan"], times["move"], strict=True)])
    return {
        "draw_ms": ms["draw"],
        "plan_ms": ms["plan"],
        "move_ms": ms["move"],
        "gather_ms": ms[fastest],
        "floor_ms": ms["floor"],
        "round_ms": whole,
        "choose_ms": ms["choose"],
        "compaction_ms": ms["draw"] + ms["choose"] + ms[fastest],
        "planned_ahead": cache.ahead,
        "gather_variant": fastest,
        "gather_over_move": ms[fastest] / ms["move"],
        "gather_over_round": ms[fastest] / whole,
        "compaction_over_round": (ms["draw"] + ms["choose"] + ms[fastest]) / whole,
        "move_over_floor": ms["move"] / ms["floor"],
        "moved_bytes": moved,
        "gathered_bytes": 2 * compaction.kept * shape.layers * shape.batch * shape.heads
        * shape.head_dim * shape.dtype.itemsize,
    }  # fmt: skip


def run(
    budgets: Sequence[int] = (512, 2048, 8192),
    buffer: int = 64,
    batches: Sequence[int] = (1, 16),
    policies: Sequence[str] = ("random",),
    *,
    layers: int = 4,
    heads: int = 8,
    head_dim: int = 128,
    dtype: str = "bfloat16",
    repeats: int | None = None,
    device: str | None = None,
    seed: int = 0,
    torch_threads: int | None = None,
    show: bool = True,
) -> dict[str, Any]:
    """Time a round's parts for each policy, batch size and budget.

    Args:
        budgets: K, entries a head.
        buffer: r, victims a head and round.
        batches: rows of a batch.
        policies: short names; policies that need more than positions are refused.
        layers: attention layers; the work is proportional to them.
        heads: KV heads of a layer.
        head_dim: numbers of a key.
        dtype: of the entries.
        repeats: timed turns; by default as many as fit in a few seconds, 15 to 200.
        device: by default the GPU if there is one.
        seed: of the draws.
        torch_threads: CPU threads of torch; None leaves them.
        show: progress bar on stderr.

    Returns:
        Environment and ``rows``; times in ms, medians of the turns. ``round_ms`` is draw, plan and
        move together; where the engine draws and plans several rounds at once (``planned_ahead``), each
        has its share. ``compaction_ms`` adds what a compaction needs before its gather: the same draw,
        and choosing and sorting what stays.
    """
    where, rows = place(device), []
    with threads(torch_threads), torch.inference_mode():
        with progress("bench round", len(policies) * len(batches) * len(budgets), show) as step:
            for name in policies:
                for batch in batches:
                    for budget in budgets:
                        shape = Shape(layers, batch, heads, head_dim, getattr(torch, dtype))
                        turns = repeats or min(200, max(15, 400_000 // (batch * budget)))
                        settings = Settings.of(name, budget=budget, buffer=buffer, seed=seed)
                        row = {"policy": name, "budget": budget, "buffer": buffer, "batch": batch}
                        row |= _time(settings, shape, where, turns)
                        row |= {
                            "layers": layers,
                            "heads": heads,
                            "head_dim": head_dim,
                            "dtype": dtype,
                            "repeats": turns,
                        }
                        rows.append(row)
                        step(f"{name}, batch {batch}, budget {budget}")
        return record(rows, where, seed)


def table(result: dict[str, Any]) -> Table:
    """The rows as a table; ``--json`` has all numbers."""
    from ..report.tables import table as make

    times = ("draw", "plan", "move", "round", "gather")
    ratios = ("gather_over_move", "gather_over_round", "move_over_floor")
    return make(
        f"One round, ms ({result['device']}, {result['threads']} threads)",
        ["policy", "batch", "K", *times, "gather\n/move", "gather\n/round", "move\n/floor"],
        [
            (row["policy"], row["batch"], row["budget"], *(f"{row[f'{name}_ms']:.2f}" for name in times),
             *(f"{row[name]:.1f}" for name in ratios))
            for row in result["rows"]
        ],
        caption="round = draw + plan + move. gather: copy the K kept entries of every head instead. "
        "floor: one plain copy of the moved bytes.",
    )  # fmt: skip
