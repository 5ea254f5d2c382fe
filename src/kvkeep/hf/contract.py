"""What transformers calls on a cache, apart from storing entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import Cache

from ..layout import Row
from .model import Unsupported
from .reader import Reader
from .rounds import Rounds
from .step import Step
from .streams import Streams
from .watch import Watch

#: Name under which the installed transformers takes a cache.
CACHE_ARGUMENT = "cache" if Version(transformers.__version__) >= Version("5.24.0") else "past_key_values"


class Contract(Cache):
    """The part of :class:`~kvkeep.hf.cache.EvictCache` that ``generate`` and models talk to."""

    rows: list[Row]
    _samples: Sequence[int] | None
    _reader: Reader | None
    _rounds: Rounds
    watch: Watch
    _streams: Streams
    _step: Step | None
    _columns: int
    _asked: bool
    _marked: bool

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns seen so far, padding included: what the next token's position is counted from."""
        if self._step is None:
            self._asked = True
        return self._columns

    @property
    def _is_user_defined(self) -> bool:
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # `generate` sets this when it takes over a cache: what follows is a prefill.
        self._marked = True

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: beams of one prompt share a stream and carry their entries with them."""
        self._streams.share()
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(torch.arange(len(self.rows))[indices.to("cpu")])

    def batch_repeat_interleave(self, repeats: int) -> None:
        if repeats > 1 and (self._samples is not None or any(row.rounds for row in self.rows)):
            raise Unsupported("rows cannot be repeated after a round or with samples=: their copies would share draws")
        self._select(torch.arange(len(self.rows)).repeat_interleave(repeats))

    def _select(self, indices: Tensor) -> None:
        order = indices.tolist()
        self.watch.settle(anybody=True)
        for layer in self.layers:
            layer.reorder_cache(indices)
        self.rows = [replace(self.rows[i]) for i in order]
        self._streams.select(order)
        self._rounds.select(order)
        if self._reader is not None:
            self._reader.select(order)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise Unsupported("a bounded cache cannot be copied, it belongs to its model's hooks: prefill a new one")

    def crop(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.activate_past_recording()

    def activate_past_recording(self) -> NoReturn:
        raise Unsupported(
            "assisted decoding (assistant_model, prompt_lookup_num_tokens, ...) takes tokens back, which a bounded "
            "cache cannot do: call generate without it"
        )
