"""What forwards do to a bounded cache: the part of it that the hooks call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..budget import Budget
from ..layout import Round, Row
from ..policies import Policy
from ..settings import Settings
from .contract import Contract
from .layer import EvictingLayer
from .model import ModelInfo, Unsupported, refuse_attention
from .reader import Reader, Reading, refuse_repeats
from .stats import allocated
from .step import Step
from .steps import by_layer, prompt_step, too_long, trace_step, turn_step
from .streams import Streams
from .watch import Watch


class Forwards(Contract):
    """Runs the rounds that are due before a forward, and decides where it writes."""

    settings: Settings
    policy: Policy
    budget: Budget | None
    prompt_length: int | None
    context_length: int | None  # for every request
    info: ModelInfo
    watch: Watch
    evicting: list[EvictingLayer]

    def _begin_request(self) -> None:
        self.rows: list[Row] = []
        self._reader: Reader | None = None
        self._reading: Reading | None = None
        self._step: Step | None = None
        self._moving = False  # from the first move of a round to the end of its forward
        self._columns = 0
        self._context: int | None = None  # columns of this request's context, if `prefill` fed it
        self._padded = False
        self._peak = 0
        self._mode: Any = None
        self._asked = False  # get_seq_length() was called since the last forward
        self._marked = False  # generate took over the cache since the last forward
        self._streams = Streams(self._samples)
        self._rounds.begin_request()

    def trace_space(self) -> int | None:
        """Trace tokens the next forward may bring at most; None if there is no limit."""
        spaces = [row.space() for row in self.rows]
        return None if not spaces or spaces[0] is None else min(s for s in spaces if s is not None)

    def nbytes(self) -> int:
        """Bytes allocated for entries, all layers, measured on the tensors."""
        return allocated(self.layers)

    def _note_peak(self) -> None:
        extra = self._rounds.positions_nbytes + self._rounds.state_nbytes
        self._peak = max(self._peak, self.nbytes() + extra)

    @property
    def in_prompt(self) -> bool:
        """Whether no trace token has been fed yet."""
        return self._reader is None or not self._reader.in_trace

    @property
    def step(self) -> Step | None:
        """The forward that is under way."""
        return self._step

    def tap(self, module: nn.Module, queries: Tensor, keys: Tensor, mask: Tensor | None, scaling: float | None) -> None:
        """An attention module is about to compute; see :meth:`Watch.attention`."""
        assert self._step is not None
        assert self._reading is not None
        number = int(module.layer_idx)  # type: ignore[arg-type]
        told = (self._step, self._reading, self.rows, self._columns)
        self.watch.attention(number, queries, keys, mask, scaling, *told)

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
        keep = (self.settings.prefill_keep, self.settings.prefill_window)
        new = (self.budget, self.settings.protection, self.policy.slots_per_unit, *keep)
        self.rows = [Row.new(*new) for _ in range(batch)]
        self._reader = Reader(batch, self.prompt_length)
        self._streams = Streams(self._samples)
        self._streams.check(batch)
        self._rounds.begin(batch, device)

    def end(self, output: Tensor) -> None:
        """A forward is through, and the decoder gave ``output``: its columns count as seen."""
        if self._step is None or self._reader is None or self._reading is None:
            return
        if any(layer.stored is not self._step.part(i) for i, layer in enumerate(self.evicting)):
            raise RuntimeError(
                "the forward did not store its entries in every layer (gradient checkpointing in training mode drops "
                "the cache): call model.eval(), then reset()"
            )
        for layer in self.evicting:
            layer.stored = None  # a step may hold a large mask
        self.watch.end(self._step, output)
        q, self._step, self._moving = self._step.columns, None, False
        self._reader.done(q, self._reading)
        self._columns = self._reader.columns
        if self._peak == 0 or q > 1 or self._rounds.moved:
            self._note_peak()
            self._rounds.moved = False

    def _first(self, q: int, reading: Reading) -> Step:
        self._split_context(q, reading)
        rows = [replace(row) for row in self.rows]
        trace = q - reading.prompt
        for row, pad in zip(rows, reading.pads, strict=True):
            row.add_prompt(reading.prompt - min(pad, reading.prompt))
            if trace and row.limit is not None and row.cached + trace > row.limit:
                raise ValueError(too_long(trace, max(0, row.limit - row.cached)))
            row.add_trace(trace)
        self._rounds.masks.check_budget(rows)
        before, self.rows = self.rows, rows
        masked = self._padded or any(row.held for row in rows)

        def make(seen: Callable[[Row], Row]) -> Step:
            earlier, later = [seen(row) for row in before], [seen(row) for row in rows]
            return prompt_step(earlier, later, reading.pads, q, masked, self._rounds.device)

        return by_layer(len(self.evicting), rows, make)

    def _split_context(self, q: int, reading: Reading) -> None:
        """Compress the context before what follows it is fed."""
        end = self._context_end
        if self.settings.prefill_keep is None:
            return
        if reading.prompt < q:
            raise ValueError(
                "prefill_keep needs a forward that ends where the prompt ends: feed prompt and trace apart"
            )
        if end is None or self._columns > end:
            return
        if self._columns < end < self._columns + q:
            raise ValueError(
                f"a forward of columns {self._columns} to {self._columns + q} crosses the end of the context at {end}: "
                "feed the context by itself first, cache.prefill(ids[:, :context_length]) does it"
            )
        if self._columns == end and any(row.needs_compression for row in self.rows):
            self._compress(self._streams.of_context(len(self.rows)))

    @property
    def _context_end(self) -> int | None:
        return self.context_length if self._context is None else self._context

    def _compress(self, streams: Tensor) -> None:
        """Cut contexts down to the share that ``prefill_keep`` leaves them."""
        due = {
            i: event for i, row in enumerate(self.rows) if row.needs_compression and (event := row.next_compression())
        }
        if due:
            self._carry_out(due, streams)
            self._rounds.shrink(self.rows)

    def _trace(self, q: int) -> Step:
        self._compress_rest()
        space = self.trace_space()
        if space is not None and q > space:
            raise ValueError(too_long(q, space))
        due = {i: row.next_round() for i, row in enumerate(self.rows) if row.needs_round()}
        if due:
            self._carry_out(due, self._streams.get(len(self.rows)))
            self._rounds.shrink(self.rows)
        before = [replace(row) for row in self.rows]
        for row in self.rows:
            row.add_trace(q)
        masked = self._padded or any(row.held for row in self.rows)

        def make(seen: Callable[[Row], Row]) -> Step:
            starts = [seen(row).cached for row in before]
            return trace_step(starts, [seen(row) for row in self.rows], q, masked, self._rounds.device)

        return by_layer(len(self.evicting), self.rows, make)

    def _compress_rest(self) -> None:
        """The prompt has ended: compress it, unless its context was."""
        if self.settings.prefill_keep is None or not any(row.needs_compression for row in self.rows):
            return
        if self._context_end is not None and self._context_end > self._columns:
            raise ValueError(
                f"context_length={self._context_end}, but the prompt has {self._columns} columns: it counts those "
                "columns of the prompt that are compressed"
            )
        self._compress(self._streams.get(len(self.rows)))

    def _turn(self, q: int) -> Step:
        rows = [replace(row) for row in self.rows]
        events = {i: event for i, row in enumerate(rows) if (event := row.next_turn(q)) is not None}
        after = [replace(row) for row in rows]
        for row in after:
            row.add_turn(q)
        self._rounds.masks.check_budget(after)
        if events:
            self._carry_out(events, self._streams.get(len(self.rows)), spare=q)
        before = [replace(row) for row in self.rows]
        for i, row in enumerate(self.rows):
            self._rounds.note_turn(i, row, q)
            row.add_turn(q)

        def make(seen: Callable[[Row], Row]) -> Step:
            earlier = [seen(row) for row in before]
            starts = [row.turn_slot for row in earlier]
            appended = all(start == row.cached for start, row in zip(starts, earlier, strict=True))
            masked = self._padded or not appended or any(row.held for row in before)
            return turn_step(starts, [seen(row) for row in self.rows], q, masked, self._rounds.device)

        return by_layer(len(self.evicting), self.rows, make)

    def _carry_out(self, events: dict[int, Round], streams: Tensor, spare: int = 0) -> None:
        self._moving = True
        held = self._rounds.run(events, self.rows, streams, spare, self._columns)
        for i, event in events.items():
            self.rows[i].apply(event, held.get(i, ()))
