"""A trained network as a folder for transformers and vLLM, with an account of its making."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..report.files import versions, write_json
from .checkpoints import CAVEATS, Recipe
from .train import Progress
from .vocab import tokenizer


def export(model: Any, recipe: Recipe, progress: Progress, out: Path) -> None:
    """Write a trained network as a folder for transformers and vLLM, in bfloat16, with an account of its making.

    Args:
        model: Qwen3ForCausalLM in float32.
        recipe: how it was trained.
        progress: where training ended.
        out: folder to write to.
    """
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # some versions write a file that only its owner reads
    tokenizer().save_pretrained(out)
    cost = {"steps": progress.step, "tokens": progress.seen, "seconds": round(progress.seconds),
            "threads": torch.get_num_threads()}  # fmt: skip
    account = {
        "name": recipe.name,
        "caveat": CAVEATS.get(recipe.name, "of unknown provenance"),
        "recipe": json.loads(json.dumps(asdict(recipe))),
        "cost": cost,
        "training_accuracy": {kind: round(share, 4) for kind, share in progress.accuracy.items()},
        "versions": versions(),
    }
    write_json(out / "kvkeep_model.json", account)
