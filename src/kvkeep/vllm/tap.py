"""The request tap: a logits processor that changes no logit and learns which request is in which row of the batch."""

from __future__ import annotations

import logging
import weakref
from operator import index
from re import fullmatch
from typing import Any

import torch
from vllm import SamplingParams, __version__
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from .config import SEED, Refused, Serving
from .requests import Tracked
from .versions import SUPPORTED, supported

if supported(__version__):
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2
else:  # where this module is loaded, too, and must not stand in the way of engines that do not ask for kvkeep
    LogitsProcessorV2 = object  # type: ignore[assignment,misc]

logger = logging.getLogger("vllm.kvkeep")

# By the identity of their configuration, which they hold: its `instance_id` changes when the engine has started.
_taps: weakref.WeakValueDictionary[int, RequestTap] = weakref.WeakValueDictionary()


def tap_of(vllm_config: VllmConfig) -> RequestTap:
    """The tap of this process's worker.

    Raises:
        RuntimeError: vLLM made none, as under its model runner V2 or with speculative decoding.
    """
    tap = _taps.get(id(vllm_config))
    if tap is None:
        raise RuntimeError(
            "kvkeep's request tap was not loaded, so rows of the batch cannot be told apart: check that the entry "
            "point group vllm.logits_processors lists kvkeep (reinstall kvkeep beside vLLM)"
        )
    return tap


def seed_of(params: SamplingParams) -> int:
    """A request's own seed: ``kvkeep_seed``, else the low 64 bits of its sampling's seed, else 0.

    Returns:
        A whole number of 64 bits, signed.

    Raises:
        ValueError: ``kvkeep_seed`` is none. Over HTTP numbers may come as 7.0 or "7", too.
        TypeError: the seed of the sampling is not a whole number.
    """
    extra = params.extra_args or {}
    if SEED in extra:
        return _own_seed(extra[SEED])
    return 0 if params.seed is None else (index(params.seed) + 2**63) % 2**64 - 2**63


def _own_seed(given: Any) -> int:
    seed = given
    if (isinstance(seed, float) and seed.is_integer()) or (isinstance(seed, str) and fullmatch(r"-?\d{1,19}", seed)):
        seed = int(seed)
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"{SEED} must be a whole number of 64 bits, got {given!r}")
    return seed


class RequestTap(LogitsProcessor, LogitsProcessorV2):
    """Inert unless kvkeep is configured. It is both interfaces' subclass: vLLM's second model runner refuses to start
    beside an installed plug-in of the first's."""

    def __init__(self, vllm_config: VllmConfig, *args: Any) -> None:
        serving = Serving.of(vllm_config.additional_config)
        self.serving = serving
        self.rows: list[Tracked | None] = []
        self._away: dict[int, Tracked] = {}
        self._warned, self._checked = False, False
        self._config = vllm_config
        if serving is not None:
            if not supported(__version__):
                raise Refused(
                    f"vLLM {__version__} is not tested (tested: {', '.join(SUPPORTED)}): install one, or remove kvkeep"
                )
            from .refusals import refuse, refuse_backend

            refuse(vllm_config, serving)
            if len(args) != 2:  # (device, is_pin_memory) in the first model runner
                raise Refused(
                    "kvkeep does not run on vLLM's model runner V2 yet: start with VLLM_USE_V2_MODEL_RUNNER=0"
                )
            refuse_backend(vllm_config)
            _taps[id(vllm_config)] = self

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request's ``kvkeep_seed`` that is none; HTTP 400.

        vLLM asks this of every engine beside which kvkeep is installed: nothing else may be refused here.
        """
        extra = sampling_params.extra_args or {}
        if SEED in extra:
            _own_seed(extra[SEED])

    def is_argmax_invariant(self) -> bool:
        """It changes nothing."""
        return True

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """The logits as they are."""
        return logits

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Model runner V2: this processor modifies no request's logits."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows of the batch, right before each forward."""
        if self.serving is None or batch_update is None:
            return
        if not self._checked:
            from .asked import check_layers

            check_layers(self._config)
            self._checked = True
        for row in batch_update.removed:
            self._grow(row)
            self._leave(self.rows[row])
            self.rows[row] = None
        for row, params, prompt, _ in batch_update.added:
            self._grow(row)
            self._leave(self.rows[row])
            self.rows[row] = self._track(params, prompt)
        for a, b, direction in batch_update.moved:
            self._grow(max(a, b))
            if direction == MoveDirectionality.SWAP:
                self.rows[a], self.rows[b] = self.rows[b], self.rows[a]
            else:
                self.rows[b], self.rows[a] = self.rows[a], None
        del self.rows[batch_update.batch_size :]

    def _grow(self, row: int) -> None:
        self.rows.extend([None] * (row + 1 - len(self.rows)))

    def _leave(self, request: Tracked | None) -> None:
        """Remember a request that leaves the batch: under pipeline parallelism each comes back every few steps.

        Only where it would cost something to make it anew: positions and block orders are replayed from round 0 on.
        """
        if request is None or not (request.serving.policy.signals or request.serving.whole_blocks):
            return
        self._away[id(request.prompt)] = request
        if len(self._away) > self._config.scheduler_config.max_num_seqs:
            del self._away[next(iter(self._away))]

    def _track(self, params: SamplingParams, prompt: list[int] | None) -> Tracked:
        assert self.serving is not None
        if prompt is None:
            raise RuntimeError("a request came without token ids of its prompt, which its draws depend on")
        known = self._away.pop(id(prompt), None)  # the same list for all of a request's life
        if known is not None and known.prompt is prompt and known.sample == seed_of(params):
            return known
        made = Tracked(self.serving, prompt, seed_of(params))
        if not self._warned and any(r is not None and r.same_draws(made) for r in self.rows):
            self._warned = True
            logger.warning(
                "kvkeep: requests with the same prompt and the same seed share their draws (n > 1 without a seed, or "
                "one prompt sent twice). For independent samples give each a seed: `seed`, or %s in vllm_xargs or "
                "extra_args. Said once.", SEED,
            )  # fmt: skip
        return made
