"""Collects what the policy asked to see, and nothing else, while forwards run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..budget import Budget
from ..layout import Row
from ..policies import Policy
from ..rotary import Rotary
from ..signals import ATTENTION, DIGEST, ENTROPY, EVOLUTION, QUERIES
from .digests import Digests
from .information import Predictions, blocks, changed
from .layer import EvictingLayer
from .model import ModelInfo, Unsupported
from .queries import QueryRing
from .reader import Reading
from .received import received
from .step import Step

#: Signals that are a number beside each entry, in the order of their columns.
BESIDE = (ATTENTION, ENTROPY, EVOLUTION)


def columns(policy: Policy) -> dict[str, int]:
    """Which number beside an entry is which signal."""
    return {name: i for i, name in enumerate(name for name in BESIDE if name in policy.signals)}


class Watch:
    """What is known of one request's forwards.

    Args:
        policy: names the signals.
        info: layers and modules of the model.
        layers: the evicting layers.
        budget: as configured.
        rotary: how the model rotates, if the policy asks for it.
    """

    def __init__(
        self,
        policy: Policy,
        info: ModelInfo,
        layers: Sequence[EvictingLayer],
        budget: Budget,
        rotary: Rotary | None,
    ) -> None:
        self.policy, self.info, self.layers, self.rotary = policy, info, layers, rotary
        self.budget = budget
        self.columns = columns(policy)
        self.index = {layer.number: i for i, layer in enumerate(layers)}
        self.blocks = blocks(info) if EVOLUTION in policy.signals else {}
        if ENTROPY in policy.signals and info.head is None:
            raise Unsupported("the model has no output layer, whose predictions the policy asks for")
        self.predictions: Predictions | None = None

    @property
    def taps(self) -> bool:
        """Whether attention modules must hand over their queries."""
        return bool({QUERIES, DIGEST, ATTENTION} & self.policy.signals)

    def begin(self, rows: int) -> None:
        """Forget the last request; the next has ``rows`` rows."""
        signals = self.policy.signals
        self.ring = QueryRing(self.policy.query_window(self.budget)) if QUERIES in signals else None
        self.digests: Digests | None = None
        if DIGEST in signals:
            assert self.rotary is not None
            self.digests = Digests(self.policy, self.rotary, rows)
        self.predictions = None
        if ENTROPY in signals:
            assert self.info.head is not None
            self.predictions = Predictions(self.policy, self.info.head, self.info.config, self._note_entropy)
        self._hidden: dict[int, Tensor] = {}
        self._places: dict[torch.device, Tensor] = {}  # positions of the forward's columns

    # ---- while a forward runs -----------------------------------------------------------------------

    @torch.no_grad()
    def attention(
        self,
        number: int,
        queries: Tensor,
        keys: Tensor,
        mask: Tensor | None,
        scaling: float | None,
        step: Step,
        reading: Reading,
        rows: Sequence[Row],
        seen: int,
    ) -> None:
        """An attention module is about to compute.

        Args:
            number: of its layer.
            queries: [B, H_q, q, D] after RoPE.
            keys: [B, H, S, D] that it sees.
            mask: what it was given.
            scaling: of its scores.
            step: the forward.
            reading: which of its columns are what.
            rows: after it.
            seen: columns before it.
        """
        if number not in self.index:
            return
        q, i = queries.shape[2], self.index[number]
        if self.ring is not None:
            self.ring.add(number, queries, seen, scaling)
        if self.digests is not None:
            prompt = 0 if reading.turn else reading.prompt
            if prompt:
                self.digests.add_prompt(number, queries[:, :, :prompt], [min(pad, prompt) for pad in reading.pads])
            if prompt < q:
                positions = self._positions(rows, q, queries.device)[:, prompt:]
                self.digests.add_trace(number, queries[:, :, prompt:], positions)
        if ATTENTION in self.columns:
            part = step.part(i)
            weights = received(queries, keys, mask, scaling, part.pads)
            self.layers[i].receive(part, self.columns[ATTENTION], weights)

    def _positions(self, rows: Sequence[Row], q: int, device: torch.device) -> Tensor:
        """int64 [B, q], of the forward's columns; made once for all layers, since it may wait for the device."""
        if device not in self._places:
            ends = torch.tensor([row.seen for row in rows], device=device)[:, None]
            self._places[device] = ends + torch.arange(-q, 0, device=device)
        return self._places[device]

    def hidden(self, number: int, states: Tensor) -> None:
        """A block of the decoder gave its hidden states [B, q, E]."""
        self._hidden[number] = states.detach()

    @torch.no_grad()
    def end(self, step: Step, output: Tensor) -> None:
        """A forward is through; ``output`` is the decoder's, after its final norm."""
        self._places = {}
        if self.blocks:
            late = output if self.policy.final_norm else self._hidden[max(self.blocks)]
            for layer in self.layers:
                early = self._hidden[layer.number]
                values = changed(early, late.to(early.device))
                layer.note(step.part(self.index[layer.number]), self.columns[EVOLUTION], values)
            self._hidden = {}
        if self.predictions is not None:
            self.predictions.wait(output, step)

    def _note_entropy(self, step: Step, values: Tensor) -> None:
        for i, layer in enumerate(self.layers):
            layer.note(step.part(i), self.columns[ENTROPY], values)

    def settle(self, anybody: bool = False) -> None:
        """Before entries move: nothing about earlier forwards may be outstanding.

        Args:
            anybody: also what another thread left; without it only this thread's last forward is meant.
        """
        if self.predictions is not None:
            self.predictions.settle(anybody)

    # ---- upkeep -------------------------------------------------------------------------------------

    def select(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        for part in (self.ring, self.digests, self.predictions):
            if part is not None:
                part.select(order)

    @property
    def nbytes(self) -> int:
        """Bytes of what is remembered between forwards, numbers beside the entries included."""
        parts = (self.ring, self.digests, self.predictions)
        held = sum(part.nbytes for part in parts if part is not None)
        return held + sum(layer.beside_nbytes for layer in self.layers)


def output_of(output: Any) -> Tensor:
    """Hidden states a decoder or a block returned."""
    found: Tensor = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
    return found
