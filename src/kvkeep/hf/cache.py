"""The bounded cache of the transformers engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..budget import Budget
from ..settings import Settings
from ..signals import DIGEST, ROTARY
from .contract import CACHE_ARGUMENT
from .forwards import Forwards
from .hooks import Hooks
from .layer import EvictingLayer
from .model import examine, refuse_signals
from .rotary import facts
from .rounds import Rounds
from .stats import describe
from .watch import Watch, columns

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EvictCache(Forwards):
    """A cache that never holds more than K + r entries of a KV head.

    Make one with :func:`kvkeep.evict` or :meth:`kvkeep.Settings.cache` and pass it to ``generate``
    or to the model's forward, under the name that the installed transformers wants
    (``past_key_values`` or ``cache``). Forward hooks on the model tell it of each forward; nothing
    of transformers is patched. Inference only: stored entries carry no gradient.

    Args:
        model: a causal language model of transformers.
        settings: policy, budget, protection, seed.
        samples: sample number of each row; by default rows with equal prompts are numbered in order.

    Raises:
        Unsupported: the model or its configuration cannot work with an evicting cache.
        ValueError: the settings do not fit the model.
    """

    def __init__(self, model: PreTrainedModel, settings: Settings, samples: Sequence[int] | None = None) -> None:
        self.settings = settings
        self.policy = settings.make_policy()
        self.budget = settings.make_budget()
        self.prompt_length: int | None = None
        self.context_length: int | None = None
        refuse_signals(self.policy)
        self.info = examine(model)
        rounds = self.budget or Budget.without_rounds(settings.prefill_window)
        self.policy.check(self.info.heads, rounds)
        known = facts(self.info, rotary=bool({ROTARY, DIGEST} & self.policy.signals))
        self.policy.check_model(known)
        layers = list(self.info.layers)
        self.evicting: list[EvictingLayer] = []
        owner = weakref.proxy(self)  # a cycle would keep the entries until the garbage collector runs
        for number in self.info.evicting:
            part = _part_of(owner, len(self.evicting))
            numbers = len(columns(self.policy))
            layers[number] = EvictingLayer(number, self.info.heads, part, lambda: owner._columns, numbers)
            self.evicting.append(layers[number])
        super().__init__(layers=layers)
        self.watch = Watch(self.policy, self.info, self.evicting, rounds, known.rotary)
        self._rounds = Rounds(self.policy, settings, self.info, self.evicting, self.watch)
        self._samples = samples
        self._begin_request()
        self._hooks = Hooks(self, self.info, self.watch)

    # ---- for users ------------------------------------------------------------------------------

    def reset(self, samples: Sequence[int] | None = None) -> None:
        """Forget everything, ready for the next prompt.

        Args:
            samples: sample number of each row from now on. Without new numbers, an equal prompt
                draws as it did before: draws depend on the prompt, not on what came before it.
        """
        if samples is not None:
            self._samples = list(samples)
        super().reset()
        for layer in self.layers:  # older transformers keep a sliding layer's tensors, filled with zeros
            layer.keys = layer.values = None
            layer.is_initialized = False
        self._begin_request()

    def close(self) -> None:
        """Take the hooks off the model. The cache cannot be used any more."""
        self._hooks.remove()

    def as_prompt(self) -> AbstractContextManager[None]:
        """Forwards inside are prompt, whatever their size: a new turn, or a last chunk of one token."""
        return self._as("prompt")

    def as_trace(self) -> AbstractContextManager[None]:
        """Forwards inside are trace, whatever their size: teacher forcing in chunks."""
        return self._as("trace")

    def prefill(self, ids: Tensor, attention_mask: Tensor | None = None, chunk: int | None = None) -> None:
        """Feed the context of a request alone, so that ``prefill_keep`` compresses it without the question.

        Then hand the whole prompt, context first, to ``generate`` with this cache: it feeds what is new.

        Args:
            ids: int64 [B, n], the context, padded on the left.
            attention_mask: [B, n], 0 for padding.
            chunk: columns fed at once; all by default. It bounds what a policy needs of hidden states.
        """
        if self.settings.prefill_keep is None:
            raise ValueError("prefill() compresses a context: say how much stays, e.g. prefill_keep=0.4")
        if self._columns:
            raise ValueError(f"prefill() begins a request, but {self._columns} tokens were seen: call reset() first")
        if ids.dim() != 2 or ids.shape[1] == 0:
            raise ValueError(
                f"prefill() takes token ids [rows, columns] with at least one column, got {list(ids.shape)}"
            )
        n, model = ids.shape[1], self.info.decoder
        positions = None if attention_mask is None else (attention_mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad(), self.as_prompt():
            for first in range(0, n, chunk or n):
                end = min(n, first + (chunk or n))
                told: dict[str, Any] = {CACHE_ARGUMENT: self, "use_cache": True}
                if attention_mask is not None and positions is not None:
                    told |= {"attention_mask": attention_mask[:, :end], "position_ids": positions[:, first:end]}
                model(ids[:, first:end], **told)
        self.watch.settle(anybody=True)
        self._context = n

    @contextmanager
    def _as(self, mode: str) -> Iterator[None]:
        before, self._mode = self._mode, mode
        try:
            yield
        finally:
            self._mode = before

    def override(self, keep: Tensor | None = None, forget: Tensor | None = None) -> None:
        """Force entries to stay or to go, for probes. Call it before the first round.

        Args:
            keep: bool [B, L, H, T] (any axis but the last may be 1): entries at these positions are
                never evicted. L counts the evicting layers.
            forget: same shape: entries that go first. ``keep`` outranks it.
        """
        masks = self._rounds.masks
        before = masks.keep, masks.forget
        try:
            self._rounds.override(keep, forget)
            masks.check_budget(self.rows)
        except ValueError:
            masks.put_back(*before)
            raise

    def kept_positions(self, row: int = 0) -> Tensor:
        """Positions that are still cached, ascending: int32 [L, H, n] on the CPU (L evicting layers)."""
        return self._rounds.kept_positions(row, self.rows)

    def stats(self, positions: bool = False) -> dict[str, Any]:
        """What the cache did and what it costs.

        Args:
            positions: add ``kept_positions``, a list with an int32 tensor [L, H, n] a row.

        Returns:
            Lists have one number a row. ``entries`` counts what each KV head of an evicting layer
            holds; ``bytes`` are allocated bytes: ``entries`` (keys and values of all layers),
            ``positions`` (position store), ``policy`` (its state, and rounds planned ahead), ``now`` and ``peak``
            (their sum).
        """
        self._note_peak()
        found = describe(self, self._rounds.positions_nbytes, self._rounds.state_nbytes, self._peak)
        if positions:
            found["kept_positions"] = [self.kept_positions(row) for row in range(len(self.rows))]
        return found


def _part_of(owner: Any, index: int) -> Any:
    """Gives the forward that is under way as one evicting layer sees it."""
    return lambda: None if owner._step is None else owner._step.part(index)
