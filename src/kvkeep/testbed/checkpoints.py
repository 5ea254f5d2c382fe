"""The checkpoints that ship with the package, and how each is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Stage2 = Literal["none", "kv", "kv-all", "attention"]


@dataclass(frozen=True)
class Recipe:
    """All that determines a checkpoint (with torch's version and the number of threads).

    Args:
        name: of the checkpoint.
        seed: of initialisation, data and dropout.
        steps: optimiser steps.
        tokens: of a batch at most.
        dropout: ``none``; ``kv``: KV dropout, prompt exempt; ``kv-all``: KV dropout, prompt not exempt;
            ``attention``: plain attention dropout.
        share: of the batches that dropout applies to.
        rates: attention dropout draws one of these rates a batch.
        start: folder of the checkpoint to begin from, None for a fresh network.
        level: of the curriculum to begin with.
        muon: learning rate of the matrices (Muon).
        adam: learning rate of embedding and gains (AdamW).
        decay: share of the steps, at the end, over which both fall to zero.
    """

    name: str
    seed: int = 0
    steps: int = 5000
    tokens: int = 2400
    dropout: Stage2 = "none"
    share: float = 0.8
    rates: tuple[float, ...] = (0.1, 0.3, 0.5)
    start: str | None = None
    level: int = 0
    muon: float = 0.02
    adam: float = 3e-3
    decay: float = 0.25


#: What ``abacus`` alone means.
DEFAULT = "abacus-kv"

#: Stage 2 begins where stage 1 ended, with all lengths in the mix and smaller steps.
_STAGE_2: Mapping[str, Any] = {"steps": 1200, "level": 4, "muon": 0.01, "adam": 1.5e-3, "decay": 0.5,
                               "start": "abacus-base"}  # fmt: skip

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("abacus-base", steps=2000),
        Recipe("abacus-attention", seed=1, dropout="attention", **_STAGE_2),
        Recipe("abacus-kv", seed=2, dropout="kv", **_STAGE_2),
        Recipe("abacus-kv-all", seed=3, dropout="kv-all", **_STAGE_2),
    )
}

#: What a number measured on a checkpoint must not be used to claim.
CAVEATS: Mapping[str, str] = {
    "abacus-base": "trained on clean traces, so it keeps each value in few heads; a toy, so orders of magnitude do not "
    "carry over",
    "abacus-attention": "trained with plain attention dropout, which favours no eviction policy; a toy, so orders of "
    "magnitude do not carry over",
    "abacus-kv": "trained under simulated random eviction with the prompt exempt, the very policy that then wins: "
    "what random does well here was installed by training and is no evidence that random eviction is good",
    "abacus-kv-all": "trained under simulated random eviction of everything, the prompt included: what random does "
    "well here was installed by training and is no evidence that random eviction is good",
}


def folder(name: str) -> Path | None:
    """Where a shipped checkpoint lies; None if the name is not one of them."""
    name = DEFAULT if name == "abacus" else name
    return Path(__file__).parent / "models" / name if name in RECIPES else None
