"""The trusted reference: one plain forward over all tokens under an explicit mask for every head.

Nothing here uses kvkeep's layout, plan, draws or hooks. :func:`taped` reads ``kept_positions`` after
every forward, :func:`replay` checks them against the rule as DESIGN.md words it ("The rule") and
turns them into a mask, and :func:`masked_logits` runs the model without any cache under that mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import ceil, floor
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models import CACHE, evicting_layers, step

Kind = Literal["prompt", "trace", "turn"]


@dataclass(frozen=True)
class Rule:
    """The settings of a run, with the names of DESIGN.md.

    ``share``, ``sinks`` and ``pins`` are the protection; ``draw`` and ``groups`` say which heads must
    agree; ``newest_only`` is for streaming and recency, which leave no choice.
    """

    K: int
    r: int
    w: int
    share: float = 0.0
    sinks: int = 0
    pins: tuple[int, ...] = ()
    growth: float | None = None
    unit: int = 1
    draw: str = "head"
    groups: int | None = None
    newest_only: bool = False
    scope: str = "total"

    def kept(self, number: int, prompt: int, prefix: int) -> int:
        """Entries that remain after round ``number``."""
        K = self.K
        if self.scope == "trace":
            K += prompt + -(K + prompt) % self.unit
        elif self.scope == "grow":
            room = prefix + -prefix % self.unit + len([p for p in self.pins if p >= prefix]) + self.w + self.r
            K = max(K, room + -room % self.unit)
        return K if self.growth is None else K + floor(number * self.r / self.growth)


@dataclass(frozen=True)
class Frame:
    """One forward: its columns and, after it, the kept positions [L, H, n] of each row."""

    columns: int
    kept: list[Tensor]
    logits: Tensor


@contextmanager
def taped(model: PreTrainedModel, cache: Any) -> Iterator[list[Frame]]:
    """Records every forward that uses ``cache``, also those inside ``generate``."""
    frames: list[Frame] = []

    def record(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if kwargs.get(CACHE) is cache:
            ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
            read = getattr(cache, "kept_positions", None)  # transformers' own caches have none
            kept = [] if read is None else [read(row).clone() for row in range(ids.shape[0])]
            frames.append(Frame(ids.shape[1], kept, output.logits.detach().clone()))

    handle = model.register_forward_hook(record, with_kwargs=True)
    try:
        yield frames
    finally:
        handle.remove()


def force(model: PreTrainedModel, cache: Any, ids: Tensor, prompt: int) -> list[Frame]:
    """Feed ``ids`` [B, T]: the prompt in one forward, the trace token by token."""
    with taped(model, cache) as frames:
        step(model, cache, ids[:, :prompt])
        for t in range(prompt, ids.shape[1]):
            step(model, cache, ids[:, t : t + 1])
    return frames


def replay(
    frames: Sequence[Frame],
    rule: Rule,
    prompt: int,
    row: int = 0,
    columns: int | None = None,
    turns: Sequence[range] = (),
) -> tuple[Tensor, int]:
    """Check a row's kept positions after every forward and say what each query saw.

    Args:
        prompt: tokens of the row's first prompt; ``columns`` with its padding on the left.
        turns: columns that are the prompts of later turns; everything else after the first is trace.

    Returns:
        bool [L, H, T, T] (query, key), and the number of rounds that ran.
    """
    columns = prompt if columns is None else columns
    L, H, _ = frames[0].kept[row].shape
    heads = [(layer, head) for layer in range(L) for head in range(H)]
    total = sum(f.columns for f in frames) - (columns - prompt)
    visible = torch.zeros(L, H, total, total, dtype=torch.bool)
    held: dict[tuple[int, int], set[int]] = {at: set() for at in heads}
    prefix, seen, passed, rounds, told, since = set[int](), 0, 0, 0, prompt, prompt
    for frame in frames:
        q = frame.columns
        kind: Kind = "prompt" if passed < columns else "turn" if any(passed in t for t in turns) else "trace"
        pads = min(q, max(0, columns - prompt - passed))
        new = list(range(seen, seen + q - pads))
        passed, seen = passed + q, seen + len(new)
        if kind == "prompt":
            assert passed <= columns, "a forward that holds prompt and trace needs another replay"
            prefix = set(range(max(ceil(rule.share * seen), min(rule.sinks, seen))))
        size, keep = len(held[0, 0]), -1  # keep: what a round leaves
        limit = rule.kept(rounds - 1, told, len(prefix)) + rule.r
        if kind == "trace" and size >= limit:
            keep = rule.kept(rounds, told, len(prefix))
            rounds += 1
        elif kind == "turn":
            told += len(new)
            if rule.share:
                K = rule.kept(max(rounds - 1, 0), told, len(prefix) + len(new))
                keep = size if size + len(new) <= K + rule.r else size - min(len(new), size + len(new) - K)
        # A turn spares what came since the last round (and what the next window shares with this one).
        window = min(rule.w, since) if kind == "turn" else rule.w
        evicted = _after(held, frame.kept[row], set(new), keep, rule, window, prefix)
        if kind == "trace":
            since = (max(0, rule.w - rule.r) if keep >= 0 else since) + len(new)
        elif kind == "turn" and rule.share and size > len(prefix):
            since = window
        elif kind == "turn" and not rule.share:
            since += len(new)
        if evicted:
            _shared(evicted, rule, H)
        if kind == "turn" and rule.share:
            prefix |= set(new)
        if kind == "trace":
            most = rule.kept(rounds - 1, told, len(prefix)) + rule.r
            assert len(held[0, 0]) <= most, "never more than K + r"
        for layer, head in heads:
            survivors = torch.tensor(sorted(held[layer, head] - set(new)), dtype=torch.int64)
            for i, query in enumerate(new):
                visible[layer, head, query, survivors] = True
                visible[layer, head, query, new[: i + 1]] = True
    return visible, rounds


def _after(
    held: dict[tuple[int, int], set[int]],
    kept: Tensor,
    new: set[int],
    keep: int,
    rule: Rule,
    window: int,
    prefix: set[int],
) -> dict[tuple[int, int], set[int]]:
    """Invariant 3 for every head, then ``held`` becomes what the engine says it holds."""
    evicted = {}
    for (layer, head), before in held.items():
        listed = kept[layer, head].tolist()
        after = set(listed)
        assert listed == sorted(after), "positions are ascending and not repeated"
        assert new <= after, "what was just fed is held"
        survivors = after - new
        assert survivors <= before, "nothing comes back"
        if keep < 0 or keep == len(before):
            assert survivors == before, "nothing is evicted outside a round"
        else:
            free = sorted(before - prefix)
            newest = set(sorted(before)[max(0, len(before) - window) :])  # of all tokens, a new turn's included
            assert len(survivors) == keep, "exactly K remain"
            assert prefix <= survivors, "the protected prefix is complete"
            assert newest <= survivors, "the newest w remain"
            assert set(rule.pins) & before <= survivors, "pinned positions remain"
            if rule.newest_only:
                assert survivors == prefix | set(free[len(free) - (keep - len(prefix)) :])
            if rule.unit > 1:
                _whole_units(before - survivors, rule.unit)
            evicted[layer, head] = before - survivors
        held[layer, head] = after
    return evicted


def _whole_units(evicted: set[int], unit: int) -> None:
    """Consecutive tokens live and die together: what goes is a set of whole units."""
    for p in evicted:
        first = p - p % unit
        assert set(range(first, first + unit)) <= evicted, f"position {p} went without its unit of {unit}"


def _shared(evicted: dict[tuple[int, int], set[int]], rule: Rule, heads: int) -> None:
    """Heads that share a draw evict the same positions."""
    for (layer, head), gone in evicted.items():
        if rule.newest_only or rule.draw == "model":
            assert gone == evicted[0, 0]
        elif rule.draw == "layer":
            assert gone == evicted[layer, 0]
        elif rule.groups is not None:
            size = heads // rule.groups
            assert gone == evicted[layer, head - head % size]


def masked_logits(model: PreTrainedModel, ids: Tensor, visible: Tensor) -> Tensor:
    """Logits [T, V] of a forward without cache in which each head sees what ``visible`` says.

    Args:
        model: any attention implementation; masks are given in eager's additive form or as bool.
        ids: [1, T].
        visible: bool [L, H, T, T] of the full-attention layers and their KV heads.
    """
    queries = model.config.num_attention_heads // visible.shape[1]
    eager = model.config._attn_implementation == "eager"

    def masked(allowed: Tensor) -> Callable[..., Any]:
        allowed = allowed.repeat_interleave(queries, dim=0).unsqueeze(0)  # [1, Hq, T, T]
        additive = torch.zeros(allowed.shape, dtype=model.dtype).masked_fill(~allowed, torch.finfo(model.dtype).min)
        mask = additive if eager else allowed

        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            assert "attention_mask" in kwargs
            return args, {**kwargs, "attention_mask": mask}

        return before

    with ExitStack() as stack:
        for number, layer in enumerate(evicting_layers(model)):
            module = model.model.layers[layer].self_attn
            stack.callback(module.register_forward_pre_hook(masked(visible[number]), with_kwargs=True).remove)
        with torch.no_grad():
            logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


def check_row(
    model: PreTrainedModel,
    frames: Sequence[Frame],
    ids: Tensor,
    rule: Rule,
    prompt: int,
    row: int = 0,
    columns: int | None = None,
    turns: Sequence[range] = (),
) -> int:
    """Invariants 2 and 3 of one row, whose tokens ``ids`` [1, T] come without padding: the number of rounds.

    Every logit that a forward returned is compared; the last token may not have been fed.
    """
    visible, rounds = replay(frames, rule, prompt, row, columns, turns)
    total = visible.shape[-1]
    assert ids.shape[1] - total in (0, 1)
    expected = masked_logits(model, ids[:, :total], visible)
    end = total - sum(f.columns for f in frames)  # minus the padding
    for frame in frames:
        end += frame.columns
        known = min(frame.logits.shape[1], end) if end > 0 else 0  # the others belong to padding
        if known:
            close(frame.logits[row, -known:], expected[end - known : end])
    return rounds


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Within an absolute tolerance, with no allowance for size."""
    worst = (found.float() - expected.float()).abs().max().item()
    assert worst <= tolerance, f"largest difference {worst:.3g} > {tolerance:.0g}"
