"""Entropy of predictions and change of hidden states: what can be known of a token only after the whole forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from ..policies import Policy
from .model import ModelInfo, Unsupported
from .step import Step

_POSITIONS = 256  # whose logits exist at once
_TOLERANCE = 2e-2  # of logits in half precision
_SCALED = ("logits_scaling", "logit_scale")  # of models whose head is followed by something kvkeep does not know


def blocks(info: ModelInfo) -> dict[int, nn.Module]:
    """The decoder's blocks by layer number: the evicting ones, and the last.

    Raises:
        Unsupported: the decoder has no list of blocks.
    """
    layers: Any = getattr(info.decoder, "layers", None)
    if layers is None or len(layers) != len(info.layers):
        raise Unsupported(f"{type(info.decoder).__name__} has no list of layers that kvkeep can find for hidden states")
    return {number: layers[number] for number in sorted({*info.evicting, len(layers) - 1})}


def changed(early: Tensor, late: Tensor) -> Tensor:
    """1 - cosine of hidden states [B, q, E], float32 [B, q]."""
    return 1.0 - torch.cosine_similarity(early.float(), late.float(), dim=-1)


@dataclass
class _Waiting:
    """A forward whose predictions are not known yet."""

    hidden: Tensor  # [B, q, E], after the final norm
    step: Step
    thread: int


class Predictions:
    """Entropy of the prediction made at each token of each forward.

    The output layer is not run a second time where its own forward has all that is wanted; for a prompt it usually
    predicts after the last token only, so the others' logits are made here, a few positions at a time.

    Args:
        policy: has the entropy.
        head: the model's output layer, which turns hidden states into logits.
        config: of the model, for what follows the output layer.
        note: called with a forward and its entropies, float32 [B, q].
    """

    def __init__(self, policy: Policy, head: nn.Module, config: Any, note: Callable[[Step, Tensor], None]) -> None:
        if any(getattr(config, name, None) not in (None, 1, 1.0) for name in _SCALED):
            raise Unsupported(
                f"{config.model_type} scales its logits in a way kvkeep does not know: entropy is not known"
            )
        self.policy, self.head, self.note = policy, head, note
        self.cap: float | None = getattr(config, "final_logit_softcapping", None)
        self.waiting: _Waiting | None = None
        self.before: Tensor | None = None  # [B], of the newest token before the forward
        self.started: list[bool] = []  # rows that have had a token that is not padding
        self._busy = False
        self._newest: Tensor | None = None  # [B, V], logits as they are taken here, until they were compared once
        self._compared = False

    def wait(self, hidden: Tensor, step: Step) -> None:
        """A forward's hidden states are known."""
        self.waiting = _Waiting(hidden.detach(), step, get_ident())

    def predicted(self, logits: Tensor) -> None:
        """The output layer ran: these may be the logits of the forward that waits."""
        if self.waiting is None or self._busy or self.waiting.thread != get_ident():
            return
        whole = logits.shape[:2] == self.waiting.hidden.shape[:2]
        self._settle(self._in_parts(logits, self._entropy) if whole else None)

    def settle(self, anybody: bool = False) -> None:
        """Compute what still waits: this thread's last forward, or whoever's it was."""
        if self.waiting is not None and (anybody or self.waiting.thread == get_ident()):
            self._settle(None)

    @staticmethod
    def _in_parts(x: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        """``make`` of [B, q, ...], a few positions of all rows at a time."""
        return torch.cat([make(part) for part in x.split(max(1, _POSITIONS // x.shape[0]), dim=1)], dim=1)

    @torch.no_grad()
    def _settle(self, found: Tensor | None) -> None:
        assert self.waiting is not None
        hidden, step = self.waiting.hidden, self.waiting.step
        self.waiting = None
        if found is None:
            self._busy = True
            try:
                found = self._in_parts(hidden, lambda part: self._entropy(self.head(part)))
            finally:
                self._busy = False
        newest = found[:, -1].clone()
        if self.policy.entropy_shift:
            found = self._of_predicted(found, step.pads)
        self.before = newest
        self.note(step, found)

    def _of_predicted(self, found: Tensor, pads: Sequence[int]) -> Tensor:
        """Entropy of the prediction *of* each token; 0 for a row's first, which nothing predicts."""
        before = torch.zeros_like(found[:, 0]) if self.before is None else self.before
        moved = torch.cat([before[:, None], found[:, :-1]], dim=1)
        new = [i for i in range(len(pads)) if not (self.started and self.started[i])]
        for row in new:  # in its first forward only
            moved[row, : pads[row] + 1] = 0.0
        self.started = [pad < found.shape[1] or row not in new for row, pad in enumerate(pads)]
        return moved

    def _entropy(self, logits: Tensor) -> Tensor:
        logits = logits.detach().float()
        if self.cap is not None:
            logits = (logits / self.cap).tanh() * self.cap
        if not self._compared:
            self._newest = logits[:, -1]
        return self.policy.entropy(logits)

    def compare(self, returned: Tensor) -> None:
        """See once that these are the logits the model returns, [B, q, V]: some models scale them afterwards.

        Raises:
            Unsupported: they are not.
        """
        if self._compared or self._newest is None or self.waiting is not None:
            return
        self._compared, newest, self._newest = True, self._newest, None
        if newest.shape == returned[:, -1].shape and not torch.allclose(
            newest, returned[:, -1].float(), rtol=_TOLERANCE, atol=_TOLERANCE
        ):
            raise Unsupported("the model changes its logits after the output layer, so their entropy is not known here")

    def select(self, order: Sequence[int]) -> None:
        """Keep these rows, in this order; what waited was settled before any entry moved."""
        if self.before is not None:
            self.before = self.before[list(order)]
        self.started = [self.started[i] for i in order] if self.started else []

    @property
    def nbytes(self) -> int:
        """Bytes it takes between forwards."""
        held = [self.before, None if self.waiting is None else self.waiting.hidden]
        return sum(t.untyped_storage().nbytes() for t in held if t is not None)
