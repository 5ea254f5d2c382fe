"""The door between engines and everything that uses them: evaluations, probes and benches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from .settings import Settings


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
        text: what was generated as text, special tokens left out.
        tokens: ids that were generated, without the prompt, without a forced beginning and without padding.
        stats: what it cost, see :meth:`kvkeep.hf.cache.EvictCache.stats`, as it stood at the end of this trace (a
            batch goes on until its last row ends). Besides ``mean_entries`` and ``peak_entries``, what a KV head of an
            evicting layer held, and ``mean_bytes`` and ``peak_bytes``, allocated bytes of the batch divided by its
            rows: mean and maximum over the forwards of this trace, the prompt's among them.
    """

    text: str
    tokens: list[int]
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Forced:
    """What a model says of a trace it was forced to take.

    Attributes:
        logprobs: float32 [T], log-probability of each of its tokens.
        greedy: bool [T], whether the token is the most probable one.
        rounds: int32 [T], rounds that had run when the token was predicted.
        stats: what it cost, as in :class:`Sample`.
    """

    logprobs: Tensor
    greedy: Tensor
    rounds: Tensor
    stats: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunk:
    """Predictions of some consecutive tokens of forced traces.

    Attributes:
        start: index in the trace of the first token that is predicted.
        logprobs: float32 [R, t, V], log-probabilities of what token ``start + i`` of each row could be, on the
            model's device.
    """

    start: int
    logprobs: Tensor


class Forcing(Protocol):
    """Teacher forcing under way: an iterator of chunks, which holds a cache until it ends or is closed."""

    def __iter__(self) -> Forcing: ...

    def __next__(self) -> Chunk: ...

    def stats(self) -> list[dict[str, Any]]:
        """What each row cost, as in :class:`Sample`. RuntimeError before the last chunk was taken."""
        ...

    def rounds(self) -> Tensor:
        """int32 [R, T], rounds that had run when each token was predicted. RuntimeError before the end."""
        ...

    def close(self) -> None:
        """Give the cache back before the end. May be called at any time, and again."""
        ...


@runtime_checkable
class Engine(Protocol):
    """What runs a model under a policy.

    Attributes:
        settings: the policy, its budget, protection and seed.
        kv_shape: (L, H), evicting layers of the model and KV heads of each: the shape of ``keep`` and ``forget``.
        context: tokens the model was made for, prompt and trace together; None if it does not say.
    """

    @property
    def settings(self) -> Settings: ...

    @property
    def kv_shape(self) -> tuple[int, int]: ...

    @property
    def context(self) -> int | None: ...

    def with_settings(self, settings: Settings) -> Engine:
        """The same model under other settings: ``engine.with_settings(Settings("full"))`` is its full cache."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples: Sequence[int],
        sampling: Sampling,
        forced: Sequence[Sequence[int]] | None = None,
    ) -> list[Sample]:
        """Generate one trace for each prompt.

        Args:
            prompts: token ids, one sequence a request, without padding.
            samples: sample number of each request; equal prompts need different ones.
            sampling: how tokens are chosen.
            forced: what each trace is forced to begin with; prompts and beginnings of a batch must be of equal
                lengths. It is trace like what follows it: a policy may evict it.
        """
        ...

    def force(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        samples: Sequence[int] | None = None,
        *,
        keep: Tensor | None = None,
        forget: Tensor | None = None,
    ) -> list[Forced]:
        """Log-probability of given traces under the policy (teacher forcing).

        Args:
            prompts: token ids, one sequence a request, of any lengths.
            continuations: the trace each request is forced to take.
            samples: sample number of each request; 0 by default.
            keep: bool [R, L, H, T] over prompt and continuation, any axis but the last may be 1: entries that are
                never evicted.
            forget: same shape: entries that go first. ``keep`` outranks it.
        """
        ...

    def logits(
        self,
        prompts: Sequence[Sequence[int]],
        continuations: Sequence[Sequence[int]],
        samples: Sequence[int] | None = None,
        *,
        keep: Tensor | None = None,
        forget: Tensor | None = None,
    ) -> Forcing:
        """The same for one batch of equal lengths, with whole distributions, chunk by chunk.

        Chunks follow each other without gaps from token 0 to the last; how many tokens they have is the engine's
        choice and differs between policies. Several forcings may be under way at once.
        """
        ...
