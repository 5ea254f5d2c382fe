"""A training run's state on disk: tensors in one safetensors file, the rest as JSON in its header."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def save_state(
    path: Path, weights: dict[str, Tensor], optimizers: list[torch.optim.Optimizer], progress: dict[str, Any]
) -> None:
    """Write weights, optimiser states and progress; a reader sees the old file or the new one."""
    tensors = {f"weight/{name}": p.detach() for name, p in weights.items()}
    for i, optimizer in enumerate(optimizers):
        for number, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                tensors[f"optimizer/{i}/{number}/{key}"] = torch.as_tensor(value)
    part = path.with_suffix(".part")
    save_file(tensors, part, metadata={"progress": json.dumps(progress)})
    os.replace(part, path)


def load_state(path: Path, weights: dict[str, Tensor], optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Read a state into ``weights`` and ``optimizers``; returns the progress.

    Raises:
        ValueError: the file does not fit the network.
    """
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        if missing := [name for name in weights if f"weight/{name}" not in names]:
            raise ValueError(f"{path} lacks {missing[0]}: it is the state of another network")
        with torch.no_grad():
            for name, parameter in weights.items():
                parameter.copy_(file.get_tensor(f"weight/{name}"))
        for i, optimizer in enumerate(optimizers):
            found: dict[int, dict[str, Tensor]] = {}
            for name in sorted(n for n in names if n.startswith(f"optimizer/{i}/")):
                _, _, number, key = name.split("/")
                found.setdefault(int(number), {})[key] = file.get_tensor(name)
            if found:
                optimizer.load_state_dict({**optimizer.state_dict(), "state": found})
        progress: dict[str, Any] = json.loads(file.metadata()["progress"])
        return progress
