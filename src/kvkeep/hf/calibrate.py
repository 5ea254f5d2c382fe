"""Measure what TriAttention must know of a model's queries: one pass over a text, sums instead of queries."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ..calibration import Calibration
from ..rotary import Rotary
from .contract import CACHE_ARGUMENT
from .model import ModelInfo, examine
from .queries import listen, tap_modules
from .rotary import facts

LEAST = 256  # tokens; means of fewer say little


def calibrate(
    model: PreTrainedModel,
    ids: Sequence[int],
    *,
    name: str = "",
    chunk: int = 2048,
    report: Callable[[int], None] | None = None,
) -> Calibration:
    """Means of all query heads' queries before RoPE over a text.

    Queries are taken where attention is computed, so that whatever the model does to them first (norms, partial
    rotation) is in them. Takes the memory of the model's own cache of the text.

    Args:
        model: a causal language model with rotary positions.
        ids: the text's tokens.
        name: of the model, for the file.
        chunk: tokens of a forward; changes nothing but memory and time.
        report: called after each forward with the number of tokens done.

    Raises:
        ValueError: the text is too short or too long for the model, or the model is not supported.
    """
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk must be a whole number of at least 1, got {chunk!r}")
    if len(ids) < LEAST:
        raise ValueError(f"the text has {len(ids)} tokens, too few for a mean: give at least {LEAST}")
    longest = longest_text(model)
    if longest is not None and len(ids) > longest:
        raise ValueError(f"the text has {len(ids)} tokens, but the model was made for {longest}: give fewer")
    info = examine(model)
    known = facts(info, rotary=True)
    assert known.rotary is not None
    sums = _Sums(known.rotary)
    tokens = torch.tensor([list(ids)], device=next(info.decoder.parameters()).device)
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), _tapped(info, sums.add):
        for start in range(0, len(ids), chunk):
            part = tokens[:, start : start + chunk]
            sums.positions = torch.arange(start, start + part.shape[1], device=tokens.device)
            options: dict[str, Any] = {CACHE_ARGUMENT: cache}
            info.decoder(input_ids=part, use_cache=True, **options)
            if report is not None:
                report(start + part.shape[1])
    numbers = {number: info.attention[number] for number in info.evicting}
    means = torch.stack([sums.queries[m] for m in numbers.values()]).cpu() / len(ids)
    lengths = torch.stack([sums.lengths[m] for m in numbers.values()]).cpu() / len(ids)
    pairs = known.rotary.pairs
    return Calibration(
        mu_real=means[..., :pairs].float(),
        mu_imag=means[..., pairs : 2 * pairs].float(),
        absolute=lengths.float(),
        passing=means[..., 2 * pairs :].float(),
        rotary=known.rotary,
        layers=tuple(numbers),
        heads=known.heads,
        tokens=len(ids),
        model=name,
        fingerprint=known.fingerprint(),
        text=hashlib.sha256(b" ".join(str(int(i)).encode() for i in ids)).hexdigest(),
    )


def longest_text(model: PreTrainedModel) -> int | None:
    """Tokens that the model was made for, if its configuration says so."""
    length = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return None if length is None else int(length)


class _Sums:
    """Running float64 sums of each attention module's queries before RoPE: [H_q, D], and of the pairs' lengths."""

    def __init__(self, rotary: Rotary) -> None:
        self.rotary = rotary
        self.positions = torch.empty(0)
        self.queries: dict[nn.Module, Tensor] = {}
        self.lengths: dict[nn.Module, Tensor] = {}

    def add(self, module: nn.Module, queries: Tensor) -> None:
        """Queries [1, H_q, n, D] after RoPE of the forward under way."""
        before = self.rotary.unrotate(queries[0], self.positions.to(queries.device)).double()
        for sums, block in ((self.queries, before), (self.lengths, self.rotary.complex(before).abs())):
            total = block.sum(dim=1)
            sums[module] = sums[module] + total if module in sums else total


@contextmanager
def _tapped(info: ModelInfo, take: Callable[[nn.Module, Tensor], None]) -> Iterator[None]:
    """While it is open, evicting attention modules hand over their queries."""

    def listener(module: nn.Module, queries: Tensor, *rest: Any) -> None:
        take(module, queries)

    handles = tap_modules(info.attention.values(), listener, ": it cannot be calibrated")
    try:
        yield
    finally:
        listen(None)
        for handle in handles:
            handle.remove()
