"""What a forward of the plain model shows of each round: what a policy should have seen, found without kvkeep.

Queries, keys, values, hidden states and logits come from one eager forward without a cache, in which each head sees
what its kept sets say it saw.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvkeep.rotary import Rotary
from kvkeep.testing import Entries, Made
from masked import Frame, Rule, masked_logits, replay
from models import evicting_layers, tiny


@dataclass
class Forward:
    """One forward: queries, keys and values of each evicting layer, [heads, T, D] float64, hidden states, logits."""

    q: list[np.ndarray]
    k: list[np.ndarray]
    v: list[np.ndarray]
    pre: list[np.ndarray]
    scaling: list[float]
    hidden: list[np.ndarray]  # [T, E] after each evicting layer
    last: np.ndarray  # [T, E] after the last layer, before the final norm
    normed: np.ndarray  # after it
    logits: np.ndarray
    visible: np.ndarray  # [L, H, T, T]
    inv_freq: np.ndarray
    rotary_scaling: float

    def received(self, layer: int, head: int, position: int, until: int) -> float:
        """Attention that an entry got from every query up to ``until``, over the group's query heads."""
        return float(self._received(layer, head)[position:until, position].sum())

    def _received(self, layer: int, head: int) -> np.ndarray:
        made = self.__dict__.setdefault("_weights", {})
        if (layer, head) not in made:
            group, seen = len(self.q[layer]) // len(self.k[layer]), self.visible[layer, head]
            total = np.zeros(seen.shape)
            for g in range(head * group, (head + 1) * group):
                scores = self.q[layer][g] @ self.k[layer][head].T * self.scaling[layer]
                scores = np.where(seen, scores, -np.inf)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                total += weights / weights.sum(-1, keepdims=True)
            made[layer, head] = total
        found: np.ndarray = made[layer, head]
        return found


@dataclass
class Seen:
    """A round of one row.

    Args:
        row: entries by [layer][head].
        gone: positions that each head evicted.
        past: queries before RoPE by [layer][query head], [T, D] up to the round.
        prompt: tokens of the prompt.
        number: which event of the row it is.
    """

    row: list[list[Entries]]
    gone: list[list[set[int]]]
    past: list[list[np.ndarray]]
    prompt: int
    seen: int
    number: int
    kept: list[int]
    inv_freq: np.ndarray
    rotary_scaling: float

    def made(self, shared: str) -> Made:
        """The same round for :meth:`Made.view`."""
        e = self.row[0][0]
        sizes = {"layers": len(self.row), "heads": len(self.row[0]), "group": len(e.queries)}
        made = Made([1], kept=1, protected=1, window=0, w=len(e.queries[0]), width=e.queries.shape[-1], **sizes)
        made.lengths, made.heads_of, made.scaling, made.shared = [self.seen], [self.row], e.scaling, shared
        made.rotary = Rotary(torch.from_numpy(self.inv_freq), self.rotary_scaling)
        return made


@contextmanager
def _recorded(monkeypatch: Any, model: Any) -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {"attention": {}, "hidden": {}, "pre": {}}
    names = vars(sys.modules[type(model).__module__])
    attend_, rotate_ = names["eager_attention_forward"], names["apply_rotary_pos_emb"]
    turned: list[Tensor] = []

    def rotate(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        turned.append(q)
        return rotate_(q, k, *args, **kwargs)

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **values: Any) -> Any:
        found["attention"][module.layer_idx] = (*(t[0].double().numpy() for t in (q, k, v)), scaling)
        found["pre"][module.layer_idx] = turned[-1][0].double().numpy()
        return attend_(module, q, k, v, mask, scaling=scaling, **values)

    def keep(number: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            states = output[0] if isinstance(output, tuple) else output
            found["hidden"][number] = states[0].double().numpy()

        return hook

    with monkeypatch.context() as patch, ExitStack() as stack:
        patch.setitem(names, "eager_attention_forward", attend)
        patch.setitem(names, "apply_rotary_pos_emb", rotate)
        for i, layer in enumerate(model.model.layers):
            stack.callback(layer.register_forward_hook(keep(i)).remove)
        stack.callback(model.model.norm.register_forward_hook(keep(-1)).remove)
        yield found


def forward(monkeypatch: Any, family: str, ids: Tensor, visible: Tensor) -> Forward:
    """A plain forward of ids [1, T] under the masks."""
    model: Any = tiny(family, "eager")
    with _recorded(monkeypatch, model) as found:
        logits = masked_logits(model, ids[:, : visible.shape[-1]], visible)
    layers = evicting_layers(model)
    q, k, v, scaling = (list(x) for x in zip(*(found["attention"][n] for n in layers), strict=True))
    rotary = model.model.rotary_emb
    inv_freq = getattr(rotary, "full_attention_inv_freq", None)
    inv_freq = rotary.inv_freq if inv_freq is None else inv_freq
    return Forward(
        q, k, v, [found["pre"][n] for n in layers], scaling, [found["hidden"][n] for n in layers],
        found["hidden"][len(model.model.layers) - 1], found["hidden"][-1], logits.double().numpy(), visible.numpy(),
        inv_freq.double().numpy(), float(getattr(rotary, "attention_scaling", 1.0)),
    )  # fmt: skip


def entropies(logits: np.ndarray, top: int, shift: int, renormalise: bool = False) -> np.ndarray:
    """Of each position [T]."""
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p = -np.sort(-p / p.sum(-1, keepdims=True), axis=-1)[:, :top]
    p = p / p.sum(-1, keepdims=True) if renormalise else p
    found = -(p * np.log(p)).sum(-1)
    return np.concatenate([[0.0], found[:-1]]) if shift else found


def observe(
    monkeypatch: Any,
    family: str,
    frames: Sequence[Frame],
    ids: Tensor,
    rule: Rule,
    prompt: int,
    queries: int,
    row: int = 0,
    columns: int | None = None,
    top: int = 256,
    shift: int = 1,
    final_norm: bool = False,
    renormalise: bool = False,
    turns: Sequence[range] = (),
    visible: Tensor | None = None,
) -> Iterator[Seen]:
    """Every round of a row, as a policy should have seen it.

    Args:
        ids: [1, T] without padding.
        queries: how many of the newest queries the policy sees.
        visible: what each head saw, if ``rule`` does not say it.
    """
    if visible is None:
        visible, _ = replay(frames, rule, prompt, row, columns, turns)
    seen_of = forward(monkeypatch, family, ids, visible)
    late = seen_of.normed if final_norm else seen_of.last
    entropy = entropies(seen_of.logits, top, shift, renormalise)
    pads, seen, held, number = (columns or prompt) - prompt, 0, [], 0
    for i, frame in enumerate(frames):
        kept = [[{p for p in head if p >= 0} for head in layer] for layer in frame.kept[row].tolist()]
        new = set(range(seen, seen + frame.columns - (pads if i == 0 else 0)))
        gone = [[b - a for b, a in zip(x, y, strict=True)] for x, y in zip(held, kept, strict=True)] if held else []
        if any(g for layer in gone for g in layer):
            prefix = set(range(max(int(np.ceil(rule.share * prompt)), min(rule.sinks, prompt))))
            entries = [
                [_entries(seen_of, layer, h, before, prefix, rule.w, seen, queries, entropy, late)
                 for h, before in enumerate(heads)]
                for layer, heads in enumerate(held)
            ]  # fmt: skip
            past = [[q[:seen] for q in layer] for layer in seen_of.pre]
            left = [len(heads[0] - new) for heads in kept]
            yield Seen(entries, gone, past, prompt, seen, number, left, seen_of.inv_freq, seen_of.rotary_scaling)
            number += 1
        held, seen = kept, seen + len(new)


def _entries(
    f: Forward, layer: int, head: int, held: set[int], prefix: set[int], w: int, seen: int, queries: int,
    entropy: np.ndarray, late: np.ndarray,
) -> Entries:  # fmt: skip
    group = len(f.q[layer]) // len(f.k[layer])
    free = sorted(held - prefix)
    at = list(range(seen - queries, seen))
    own = slice(head * group, (head + 1) * group)
    shown = np.zeros((2, group, queries, f.q[layer].shape[-1]))
    for j, t in enumerate(at):
        if t >= 0:
            shown[0, :, j], shown[1, :, j] = f.q[layer][own, t], f.pre[layer][own, t]
    early = f.hidden[layer]
    cosine = (early * late).sum(-1) / np.sqrt((early**2).sum(-1) * (late**2).sum(-1))
    return Entries(
        keys={p: f.k[layer][head, p] for p in held},
        values={p: f.v[layer][head, p] for p in held},
        cached=sorted(held),
        candidates=free[: len(free) - w],
        window=free[len(free) - w :],
        queries=shown[0],
        prerope=shown[1],
        query_positions=at,
        received={p: f.received(layer, head, p, seen) for p in held},
        entropy={p: float(entropy[p]) for p in held},
        evolution={p: float(1 - cosine[p]) for p in held},
        scaling=f.scaling[layer],
    )


def seen_sets(frames: Sequence[Frame], row: int, pads: int = 0) -> Tensor:
    """What each head saw, from the kept positions alone: bool [L, H, T, T]. Layers may hold different numbers."""
    layers, heads = frames[0].kept[row].shape[:2]
    total = sum(f.columns for f in frames) - pads
    visible, seen = torch.zeros(layers, heads, total, total, dtype=torch.bool), 0
    for i, frame in enumerate(frames):
        new = range(seen, seen + frame.columns - (pads if i == 0 else 0))
        for layer in range(layers):
            for head in range(heads):
                kept = frame.kept[row][layer, head].tolist()
                survivors = [p for p in kept if 0 <= p < seen]
                for j, t in enumerate(new):
                    visible[layer, head, t, survivors] = True
                    visible[layer, head, t, list(new[: j + 1])] = True
        seen += len(new)
    return visible
