"""The engine's invariants under a policy, on a tiny random model.

Nothing here looks into the engine: it feeds tokens, reads ``kept_positions()`` after every forward, and compares logits
with a forward without any cache in which each head may see what it is said to have kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..protection import Protection
from .trial import GROUP, HEADS, LAYERS, PROMPTS, TRACE, Frame, Kept, Trial, tiny_model

T = TypeVar("T")
CLOSE = 1e-5  # logits, absolute: leaving out one entry changes them by 0.01 and more


def nothing_lost(trial: Trial) -> None:
    """With a budget beyond the text nothing is evicted, and logits are those of a forward without a cache."""
    frames = trial.run(budget=200)
    whole = list(range(PROMPTS[0] + TRACE))
    for frame_heads in frames[-1].kept[0]:
        for head in frame_heads:
            _expect(head == whole, f"with a budget of 200 for {len(whole)} tokens, {set(whole) - set(head)} are gone")
    _same_logits(trial, frames)


def invariants(trial: Trial, protect: str | None = None) -> None:
    """Never more than K + r, exactly K after a round; prompt and newest w stay; heads share as the scope says."""
    policy = trial.policy
    text = policy.default_protection if protect is None else protect
    prefix, seen, rounds = set(range(Protection.parse(text).prefix(PROMPTS[0]))), 0, 0
    frames = trial.run() if protect is None else trial.run(protect=protect)
    before: Kept = [[[] for _ in range(HEADS)] for _ in range(LAYERS)]
    for frame in frames:
        new = list(range(seen, seen + frame.columns))
        seen += frame.columns
        lost = any(len(a) < len(b) + len(new) for a, b in zip(_flat(frame.kept[0]), _flat(before), strict=True))
        newest = set(range(max(0, seen - trial.every), seen))
        for i, heads in enumerate(frame.kept[0]):
            for h, head in enumerate(heads):
                where = f"layer {i}, head {h} after {seen} tokens"
                _expect(head == sorted(set(head)), f"{where}: a position is held twice, {head}")
                _expect(set(head) <= {*before[i][h], *new}, f"{where}: {set(head) - set(before[i][h])} came back")
                _expect(not lost or policy.evicts, f"{where}: {policy.name} evicts nothing, yet entries are gone")
                _expect(prefix <= set(head), f"{where}: protected {sorted(prefix - set(head))} are gone")
                _expect(newest <= set(head), f"{where}: of the newest w {sorted(newest - set(head))} are gone")
                first_layer = policy.scope in ("model", "head-of-all-layers")
                first_head = policy.scope in ("model", "layer")
                same = frame.kept[0][0 if first_layer else i][0 if first_head else h]
                _expect(head == same, f"{where}: scope {policy.scope!r} shares kept sets, but {head} is not {same}")
        sizes = [[len(head) for head in heads] for heads in frame.kept[0]]
        held = sum(map(sum, sizes)) / (LAYERS * HEADS)  # layers with budgets of their own keep K on average
        alike = sizes if policy.splits else [_flat(sizes)]
        _expect(all(len(set(s)) == 1 for s in alike), f"after {seen} tokens heads hold different numbers, {sizes}")
        rounds += lost
        _expect(
            not policy.evicts or held <= trial.total + trial.every,
            f"a head holds {held} entries after {seen} tokens, more than K + r = {trial.total + trial.every}",
        )
        _expect(
            not lost or held == trial.total + len(new), f"a round left {held - len(new)} entries, not {trial.total}"
        )
        before = frame.kept[0]
    _expect(rounds > 2 or not policy.evicts, f"only {rounds} rounds ran: lower the budget")


def logits(trial: Trial) -> None:
    """Logits equal a full cache under the mask of what each head kept."""
    _same_logits(trial, trial.run())


def unprotected(trial: Trial) -> None:
    """The same without protection, when prompt entries are candidates too."""
    if trial.policy.evicts:
        invariants(trial, "none")
        _same_logits(trial, trial.run(protect="none"))


def padded_batch(trial: Trial) -> None:
    """Rows of unequal prompts in one batch keep what each keeps alone."""
    rows = range(len(PROMPTS))
    together = trial.run(rows)
    for row in rows:
        for at, (frame, alone) in enumerate(zip(together, trial.run([row]), strict=True)):
            where = f"row {row} of a padded batch, {at} tokens into the trace"
            _same_kept(frame.kept[row], alone.kept[0], where, "alone")
            worst = (frame.logits[row] - alone.logits[0]).abs().max().item()
            _expect(worst <= CLOSE, f"{where}: logits differ by {worst:.2g} from the row alone")


def chunks(trial: Trial) -> None:
    """A trace fed in chunks keeps what it keeps token by token."""
    single = dict(zip(_seen(trial.run()), trial.run(), strict=True))
    for pieces in ((2, 4, 1, 3), (4,)):
        frames = trial.run(pieces=pieces)
        for seen, frame in zip(_seen(frames), frames, strict=True):
            where = f"trace in chunks of {pieces}, after {seen} tokens"
            _same_kept(frame.kept[0], single[seen].kept[0], where, "token by token")


#: What must hold on a model: title -> check.
ENGINE: dict[str, Callable[[Trial], None]] = {
    "nothing is lost while everything fits": nothing_lost,
    "K + r, the prompt, the newest w, no duplicates, heads share as the scope says": invariants,
    "logits are those of a full cache under a mask of what each head kept": logits,
    "the same without protection": unprotected,
    "a padded batch keeps what each row keeps alone": padded_batch,
    "chunks keep what single tokens keep": chunks,
}


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def _flat(of_layers: Sequence[Sequence[T]]) -> list[T]:
    return [of_head for heads in of_layers for of_head in heads]


def _seen(frames: Sequence[Frame]) -> list[int]:
    return torch.tensor([f.columns for f in frames]).cumsum(0).tolist()


def _same_kept(found: Kept, wanted: Kept, where: str, other: str) -> None:
    for i, (heads, others) in enumerate(zip(found, wanted, strict=True)):
        for h, (one, two) in enumerate(zip(heads, others, strict=True)):
            gone, more = sorted(set(two) - set(one)), sorted(set(one) - set(two))
            _expect(one == two, f"{where}: layer {i}, head {h} lacks {gone} and has {more}, compared with {other}")


def _same_logits(trial: Trial, frames: Sequence[Frame]) -> None:
    """Row 0, fed token by token, against one forward without a cache."""
    ends = _seen(frames)
    visible = torch.zeros(LAYERS, HEADS, ends[-1], ends[-1], dtype=torch.bool)
    for end, frame in zip(ends, frames, strict=True):
        for i, heads in enumerate(frame.kept[0]):
            for h, head in enumerate(heads):
                visible[i, h, end - frame.columns : end, head] = True
    visible = visible.tril().repeat_interleave(GROUP, dim=1)  # [L, H_q, T, T]
    with torch.no_grad(), ExitStack() as stack:
        for layer, allowed in zip(tiny_model().model.layers, visible, strict=True):
            mask = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[None]

            def masked(module: Any, args: Any, kwargs: dict[str, Any], mask: Tensor = mask) -> Any:
                return args, {**kwargs, "attention_mask": mask}

            stack.callback(layer.self_attn.register_forward_pre_hook(masked, with_kwargs=True).remove)
        expected = tiny_model()(input_ids=trial.tokens(0)[None], use_cache=False).logits[0]
    for end, frame in zip(ends, frames, strict=True):
        worst = (frame.logits[0] - expected[end - 1]).abs().max().item()
        _expect(worst <= CLOSE, f"after {end} tokens logits differ by {worst:.2g} from a full cache under the mask")
