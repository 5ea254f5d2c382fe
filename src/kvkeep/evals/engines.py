"""Engines by name: what a worker needs to load a model once and run it under many settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..engine import Engine
from ..settings import Settings
from .spelling import suggest


@dataclass(frozen=True)
class Backend:
    """How models run: the same for every arm of a comparison.

    Attributes:
        engine: name in :data:`ENGINES`.
        dtype: of weights and entries.
        attention: attention implementation of the engine.
        device: where the model lies.
    """

    engine: str = "transformers"
    dtype: str = "float32"
    attention: str = "sdpa"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"unknown engine {self.engine!r}: {suggest(self.engine, ENGINES)}")
        if self.engine == "transformers":
            check_backend(self.dtype, self.attention, self.device)

    def load(self, model: str) -> Loaded:
        """Load a model."""
        return ENGINES[self.engine](model, self)


class Loaded(Protocol):
    """A loaded model."""

    tokenizer: Any

    def engine(self, settings: Settings) -> Engine:
        """The model under one policy and budget."""
        ...


def check_backend(dtype: str, attention: str, device: str) -> None:
    """Refuse at once what no model could be loaded with.

    Raises:
        ValueError: an unknown dtype or attention implementation, or a device that is not there.
    """
    import torch
    import transformers

    dtypes = ("auto", "float32", "bfloat16", "float16")
    if dtype not in dtypes:
        raise ValueError(f"unknown dtype {dtype!r}: {suggest(dtype, dtypes)}")
    hf: Any = transformers
    known = {"eager", "sdpa", *hf.AttentionInterface()}
    if attention not in known and "/" not in attention:  # a slash names a kernel of the hub
        shown = [name for name in known if not name.startswith("kvkeep")]
        raise ValueError(f"unknown attention {attention!r}: {suggest(attention, shown)}")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error


class Transformers:
    """A model of transformers.

    Raises:
        ValueError: it cannot be loaded, or does not run with the wanted attention implementation.
    """

    def __init__(self, name: str, backend: Backend) -> None:
        from transformers.utils import logging

        from ..hf.load import load

        logging.disable_progress_bar()  # the workers' bars would cover the run's own

        self.model, self.tokenizer = load(name, dtype=backend.dtype, device=backend.device, attention=backend.attention)
        used = getattr(self.model.config, "_attn_implementation", backend.attention)
        if used != backend.attention:
            raise ValueError(f"{name} runs with attention {used}, not {backend.attention}: pass --attention {used}")

    def engine(self, settings: Settings) -> Engine:
        """See :class:`Loaded`."""
        from ..hf.engine import HFEngine

        return HFEngine(self.model, self.tokenizer, settings)


#: The door for further engines: a name and what loads a model under it.
ENGINES: dict[str, Callable[[str, Backend], Loaded]] = {"transformers": Transformers}
