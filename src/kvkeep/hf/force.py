"""Teacher forcing on transformers: given traces, fed in chunks that end where a round is due."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..engine import Chunk, Forced
from .cache import EvictCache
from .contract import CACHE_ARGUMENT
from .meter import Meter

_TOKENS = 512  # a forward brings at most
_NUMBERS = 1 << 25  # of logits a forward gives at most: 128 MiB in float32, of which there are up to three copies


def feed(
    model: PreTrainedModel, cache: EvictCache, meter: Meter, prompts: Tensor, traces: Tensor, last_only: bool = False
) -> Iterator[tuple[int, Tensor]]:
    """Feed prompts and all of their traces but the last token.

    The result is that of feeding token by token: no forward crosses a round.

    Args:
        model: whose hooks the cache has.
        cache: before its first forward.
        meter: of the cache.
        prompts: int64 [R, P].
        traces: int64 [R, T].
        last_only: give the predictions of each forward's last token only, for a caller that needs none.

    Yields:
        (index in the trace of the first token predicted, logits [R, t, V]).
    """
    yield 0, _forward(model, cache, meter, prompts, last_only=True)
    rows, length = traces.shape
    vocabulary = int(model.config.get_text_config().vocab_size)
    most = _TOKENS if last_only else max(1, min(_TOKENS, _NUMBERS // (rows * vocabulary)))
    done = 0
    while done < length - 1:
        size = min(length - 1 - done, cache.trace_space() or most, most)
        with cache.as_trace():
            logits = _forward(model, cache, meter, traces[:, done : done + size], last_only)
        done += size
        yield done - logits.shape[1] + 1, logits


@torch.no_grad()
def _forward(model: PreTrainedModel, cache: EvictCache, meter: Meter, ids: Tensor, last_only: bool) -> Tensor:
    options: dict[str, Any] = {CACHE_ARGUMENT: cache}
    if last_only and "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1  # logits of a long prompt would take more memory than all else
    logits: Tensor = model(ids, use_cache=True, **options).logits
    meter.note()
    return logits[:, -1:] if last_only else logits


class HFForcing:
    """See :class:`kvkeep.engine.Forcing`.

    Args:
        model: a causal language model.
        cache: a new one; it is closed at the end.
        prompts: int64 [R, P].
        traces: int64 [R, T].
    """

    def __init__(self, model: PreTrainedModel, cache: EvictCache, prompts: Tensor, traces: Tensor) -> None:
        self._cache, self._shape = cache, traces.shape
        self._meter = Meter(cache)
        self._chunks = feed(model, cache, self._meter, prompts, traces)
        self._stats: list[dict[str, Any]] | None = None

    def __iter__(self) -> HFForcing:
        return self

    def __next__(self) -> Chunk:
        try:
            start, logits = next(self._chunks)
        except StopIteration:
            if self._stats is None and self._meter.complete(self._shape[1]):
                self._stats = self._meter.stats([self._shape[1]] * self._shape[0])
            self.close()
            raise
        except BaseException:
            self.close()
            raise
        return Chunk(start, logits.float().log_softmax(-1))

    def stats(self) -> list[dict[str, Any]]:
        """See :meth:`kvkeep.engine.Forcing.stats`."""
        if self._stats is None:
            raise RuntimeError("the trace has not been forced to its end: take all chunks before asking for stats")
        return self._stats

    def rounds(self) -> Tensor:
        """See :meth:`kvkeep.engine.Forcing.rounds`."""
        self.stats()  # raises before the end
        return self._meter.rounds()

    def close(self) -> None:
        """See :meth:`kvkeep.engine.Forcing.close`."""
        self._chunks.close()  # type: ignore[attr-defined]  # a generator
        self._cache.close()


def collect(forcing: HFForcing, traces: Tensor) -> list[Forced]:
    """Take all chunks; keep what they say of the forced tokens ``traces`` [R, T]."""
    found, best = [], []
    for chunk in forcing:
        said = traces[:, chunk.start : chunk.start + chunk.logprobs.shape[1]]
        found.append(chunk.logprobs.gather(-1, said.unsqueeze(-1)).squeeze(-1))
        best.append(chunk.logprobs.argmax(-1) == said)
    scores, greedy = torch.cat(found, dim=1).cpu(), torch.cat(best, dim=1).cpu()
    rounds = forcing.rounds()
    return [Forced(scores[i], greedy[i], rounds[i], stats) for i, stats in enumerate(forcing.stats())]


def as_batch(requests: Sequence[Sequence[int]], what: str, device: torch.device) -> Tensor:
    """Token ids of equal length as int64 [R, T].

    Raises:
        ValueError: there are none, one is empty, or lengths differ.
    """
    lengths = sorted({len(r) for r in requests})
    if not lengths or lengths[0] == 0:
        raise ValueError(f"teacher forcing needs a request with a {what} of at least one token")
    if len(lengths) > 1:
        raise ValueError(
            f"a batch of forced traces needs {what}s of equal length, got {lengths[0]} to {lengths[-1]} tokens: "
            "run those of one length together (Engine.force sorts them itself)"
        )
    return torch.tensor([list(r) for r in requests], device=device)
