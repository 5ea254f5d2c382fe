"""The bounded cache of the transformers engine."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..layout import Round, Row
from ..settings import Settings
from ..signals import QUERIES
from .contract import Contract
from .hooks import Hooks
from .layer import EvictingLayer
from .model import Unsupported, examine, refuse_attention, refuse_signals
from .reader import Reader, Reading, refuse_repeats
from .rounds import Rounds
from .stats import allocated, describe
from .step import Step
from .steps import prompt_step, too_long, trace_step, turn_step
from .streams import Streams

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EvictCache(Contract):
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
        refuse_signals(self.policy)
        self.info = examine(model)
        if self.budget is not None:
            self.policy.check(self.info.heads, self.budget)
        layers = list(self.info.layers)
        self.evicting: list[EvictingLayer] = []
        owner = weakref.proxy(self)  # a cycle would keep the entries until the garbage collector runs
        for number in self.info.evicting:
            layers[number] = EvictingLayer(number, self.info.heads, lambda: owner._step, lambda: owner._columns)
            self.evicting.append(layers[number])
        super().__init__(layers=layers)
        self._rounds = Rounds(self.policy, settings, self.info, self.evicting)
        self._samples = samples
        self._begin_request()
        self._hooks = Hooks(self, self.info, tapped=QUERIES in self.policy.signals)

    def _begin_request(self) -> None:
        self.rows: list[Row] = []
        self._reader: Reader | None = None
        self._reading: Reading | None = None
        self._step: Step | None = None
        self._moving = False  # from the first move of a round to the end of its forward
        self._columns = 0
        self._padded = False
        self._peak = 0
        self._mode: Any = None
        self._asked = False  # get_seq_length() was called since the last forward
        self._marked = False  # generate took over the cache since the last forward
        self._streams = Streams(self._samples)
        self._rounds.begin_request()

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

    def trace_space(self) -> int | None:
        """Trace tokens the next forward may bring at most; None if there is no limit."""
        spaces = [row.space() for row in self.rows]
        return None if not spaces or spaces[0] is None else min(s for s in spaces if s is not None)

    def kept_positions(self, row: int = 0) -> Tensor:
        """Positions that are still cached, ascending: int32 [L, H, n] on the CPU (L evicting layers)."""
        return self._rounds.kept_positions(row, self.rows, self._streams)

    def nbytes(self) -> int:
        """Bytes allocated for entries, all layers, measured on the tensors."""
        return allocated(self.layers)

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

    def _note_peak(self) -> None:
        extra = self._rounds.positions_nbytes + self._rounds.state_nbytes
        self._peak = max(self._peak, self.nbytes() + extra)

    # ---- what the hooks call --------------------------------------------------------------------

    @property
    def step(self) -> Step | None:
        """The forward that is under way."""
        return self._step

    def tap(self, module: nn.Module, queries: Tensor, scaling: float | None) -> None:
        """An attention module computed its queries, [B, H_q, q, D] after RoPE, and will scale scores like this."""
        if self._rounds.queries is not None:
            self._rounds.queries.add(int(module.layer_idx), queries, self._columns, scaling)  # type: ignore[arg-type]

    def begin(
        self,
        tokens: Tensor,
        ids: Tensor | None = None,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        """Prepare for a forward: run the rounds that are due, decide where it writes.

        Args:
            tokens: its ids or embeddings, [B, q, ...].
            ids: its ids [B, q], if they are known.
            mask: its 2D attention mask.
            positions: its position ids.
        """
        batch, q = tokens.shape[:2]
        if self._step is not None or self._moving:
            raise RuntimeError("an earlier forward with this cache failed halfway: call reset() and start again")
        refuse_attention(self.info.attention[self.info.evicting[0]])
        if self._columns == 0:  # also after a refused prompt, which leaves no trace
            self._start(batch, tokens.device)
        if batch != len(self.rows):
            raise ValueError(f"the cache holds {len(self.rows)} rows and got a forward of {batch}: call reset() first")
        assert self._reader is not None
        self._reader.mode, self._reader.asked_length, self._reader.marked = self._mode, self._asked, self._marked
        reading = self._reader.read(q, mask, positions)
        if reading.turn:
            refuse_repeats(positions, [row.seen for row in self.rows])
        if ids is None and self._samples is None and self.policy.evicts:
            raise Unsupported(
                "inputs_embeds hide the prompt's ids, which seed its draws: pass samples=[one number a row]"
            )
        padded, self._padded = self._padded, self._padded or any(reading.pads)
        try:
            step = self._turn(q) if reading.turn else self._first(q, reading) if reading.prompt else self._trace(q)
        except ValueError:
            self._padded = padded
            raise
        if reading.prompt and not self._reader.in_trace and ids is not None:
            self._streams.add(ids[:, : reading.prompt], [min(p, reading.prompt) for p in reading.pads])
        self._step, self._reading = step, reading
        self._asked = self._marked = False

    def _start(self, batch: int, device: torch.device) -> None:
        new = (self.budget, self.settings.protection, self.policy.slots_per_unit)
        self.rows = [Row.new(*new) for _ in range(batch)]
        self._reader = Reader(batch, self.prompt_length)
        self._streams = Streams(self._samples)
        self._streams.check(batch)
        self._rounds.begin(batch, device)

    def end(self) -> None:
        """A forward is through: its columns count as seen."""
        if self._step is None or self._reader is None or self._reading is None:
            return
        if any(layer.stored is not self._step for layer in self.evicting):
            raise RuntimeError(
                "the forward did not store its entries in every layer (gradient checkpointing in training mode drops "
                "the cache): call model.eval(), then reset()"
            )
        for layer in self.evicting:
            layer.stored = None  # a step may hold a large mask
        q, self._step, self._moving = self._step.columns, None, False
        self._reader.done(q, self._reading)
        self._columns = self._reader.columns
        if self._peak == 0 or q > 1 or self._rounds.moved:
            self._note_peak()
            self._rounds.moved = False

    def _first(self, q: int, reading: Reading) -> Step:
        rows = [replace(row) for row in self.rows]
        trace = q - reading.prompt
        for row, pad in zip(rows, reading.pads, strict=True):
            row.add_prompt(reading.prompt - min(pad, reading.prompt))
            if trace and row.limit is not None and row.cached + trace > row.limit:
                raise ValueError(too_long(trace, max(0, row.limit - row.cached)))
            row.add_trace(trace)
        self._rounds.masks.check_budget(rows)
        before, self.rows = self.rows, rows
        return prompt_step(before, rows, reading.pads, q, self._padded, self._rounds.device)

    def _trace(self, q: int) -> Step:
        space = self.trace_space()
        if space is not None and q > space:
            raise ValueError(too_long(q, space))
        due = {i: row.next_round() for i, row in enumerate(self.rows) if row.needs_round()}
        if due:
            self._carry_out(due)
            self._rounds.shrink(self.rows)
        starts = [row.cached for row in self.rows]
        for row in self.rows:
            row.add_trace(q)
        return trace_step(starts, self.rows, q, self._padded, self._rounds.device)

    def _turn(self, q: int) -> Step:
        rows = [replace(row) for row in self.rows]
        events = {i: event for i, row in enumerate(rows) if (event := row.next_turn(q)) is not None}
        after = [replace(row) for row in rows]
        for row in after:
            row.add_turn(q)
        self._rounds.masks.check_budget(after)
        if events:
            self._carry_out(events, spare=q)
        starts = [row.turn_slot for row in self.rows]
        appended = all(start == row.cached for start, row in zip(starts, self.rows, strict=True))
        for i, row in enumerate(self.rows):
            self._rounds.note_turn(i, row, q)
            row.add_turn(q)
        return turn_step(starts, self.rows, q, self._padded or not appended, self._rounds.device)

    def _carry_out(self, events: dict[int, Round], spare: int = 0) -> None:
        self._moving = True
        self._rounds.run(events, self.rows, self._streams, spare, self._columns)
        for i, event in events.items():
            self.rows[i].apply(event)
