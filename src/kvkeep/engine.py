"""The door between engines and everything that uses them: evaluations, probes and benches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Args:
        max_new_tokens: tokens generated at most.
        temperature: 0 takes the most probable token; otherwise logits are divided by it.
        top_p: sample from the smallest set of tokens with this probability mass.
        ignore_end: never generate an end token, so that the length is exactly ``max_new_tokens``.
        seed: seed of the token choice (draws of the policy have their own, in the settings).
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    ignore_end: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):  # also refuses NaN
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")


@dataclass(frozen=True)
class Sample:
    """One generated trace.

    Attributes:
        text: the trace as text, special tokens left out.
        tokens: ids of the trace, without the prompt and without padding.
        stats: what it cost: see :meth:`kvkeep.hf.cache.EvictCache.stats`.
    """

    text: str
    tokens: list[int]
    stats: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Engine(Protocol):
    """What runs a model under a policy."""

    def generate(self, prompts: Sequence[Sequence[int]], samples: Sequence[int], sampling: Sampling) -> list[Sample]:
        """Generate one trace for each prompt.

        Args:
            prompts: token ids, one sequence a request, without padding.
            samples: sample number of each request; equal prompts need different ones.
            sampling: how tokens are chosen.
        """
        ...

    def force(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        samples: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Log-probability of given traces under the policy (teacher forcing).

        Args:
            prompts: token ids, one sequence a request.
            continuations: the trace each request is forced to take.
            samples: sample number of each request; 0 by default.

        Returns:
            float32 [T] a request: log-probability of each token of its continuation.
        """
        ...
