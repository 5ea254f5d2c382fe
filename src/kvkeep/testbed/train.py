"""Training of abacus: from a seed to a checkpoint, with progress, resume and a log.

Stage 1 learns the task on clean traces, from short problems to long ones. Stage 2 starts from a stage 1 checkpoint and
goes on under one kind of dropout.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..report.files import write_json, write_text
from .attention import Dropout
from .batches import Batch, batches, lifetimes
from .checkpoints import Recipe
from .network import Shape, forward, new_model
from .state import load_state, save_state
from .tasks import Kind

LEVELS = (6, 8, 12, 16, 24)  # largest n of each level of the curriculum


@dataclass
class Progress:
    """Where a training run is."""

    step: int = 0
    level: int = 0
    level_step: int = 0
    seen: int = 0
    seconds: float = 0.0
    loss: float = math.nan
    accuracy: dict[str, float] = field(default_factory=dict)

    def note(self, loss: float, found: dict[str, float], tokens: int) -> None:
        """Fold a step into the running means."""
        self.step, self.level_step, self.seen = self.step + 1, self.level_step + 1, self.seen + tokens
        self.loss = loss if math.isnan(self.loss) else 0.95 * self.loss + 0.05 * loss
        for kind, share in found.items():
            self.accuracy[kind] = 0.95 * self.accuracy.get(kind, share) + 0.05 * share


class Trainer:
    """One training run in one folder; picks up where the folder's state ends.

    Args:
        recipe: what to train.
        folder: state, log and, at the end, the model go here.

    Raises:
        ValueError: the folder belongs to another recipe.
    """

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(f"training needs torch 2.9 or newer (its optimizer Muon), this is {torch.__version__}")
        self.recipe, self.folder, self.shape = recipe, folder, Shape()
        self.model = self._begin()
        self.weights = dict(self.model.named_parameters())
        matrices = [p for name, p in self.weights.items() if p.dim() == 2 and "embed" not in name]
        others = [p for name, p in self.weights.items() if p.dim() != 2 or "embed" in name]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=recipe.muon, weight_decay=0.0, momentum=0.95),
            torch.optim.AdamW(others, lr=recipe.adam, weight_decay=0.0, betas=(0.9, 0.98)),
        ]
        self.progress = Progress(level=recipe.level)
        folder.mkdir(parents=True, exist_ok=True)
        described = json.loads(json.dumps(asdict(recipe)))
        if (folder / "recipe.json").exists():
            if (was := json.loads((folder / "recipe.json").read_text())) != described:
                raise ValueError(f"{folder} holds a run of another recipe ({was}): use another folder")
        else:
            write_json(folder / "recipe.json", described)
        if (folder / "state.safetensors").exists():
            self.progress = Progress(**load_state(folder / "state.safetensors", self.weights, self.optimizers))
        self._forget_later_lines()
        self._dropouts: dict[float, Dropout] = {}

    def _begin(self) -> Any:
        model = new_model(self.shape, self.recipe.seed)
        if self.recipe.start is not None:
            from ..hf.load import load

            begun = load(self.recipe.start)[0]
            shapes = [{name: p.shape for name, p in m.state_dict().items()} for m in (model, begun)]
            if shapes[0] != shapes[1]:
                raise ValueError(f"{self.recipe.start} is no abacus model: its weights have other names or shapes")
            model.load_state_dict(begun.state_dict())
        return model

    def run(self, until: int | None = None, report: Callable[[Progress], None] | None = None, save_every: int = 200
            ) -> None:  # fmt: skip
        """Train to the end of the recipe, or to step ``until``."""
        last = self.recipe.steps if until is None else min(until, self.recipe.steps)
        stream = self._stream()
        while self.progress.step < last:
            level, began = self.progress.level, time.monotonic()
            self._step(next(stream))
            self.progress.seconds += time.monotonic() - began
            if self.progress.step % 20 == 0:
                self._log()
                if report is not None:
                    report(self.progress)
            if self._ready():
                self.progress.level, self.progress.level_step, self.progress.accuracy = level + 1, 0, {}
                stream = self._stream()
            if self.progress.step % save_every == 0 or self.progress.step == last:
                self.save()

    def _stream(self) -> Iterator[Batch]:
        """Batches of the current level, from where it stands."""
        level = self.progress.level
        made = batches(self.recipe.seed, level, LEVELS[level], self.recipe.tokens)
        return itertools.islice(made, self.progress.level_step, None)

    def _ready(self) -> bool:
        """Whether the next level is due: what the trace said is found again."""
        p = self.progress
        found = min(p.accuracy.get(kind.name, 0.0) for kind in (Kind.LOOKUP, Kind.RECAP))
        return p.level + 1 < len(LEVELS) and p.level_step >= 100 and found > 0.95

    def _step(self, batch: Batch) -> None:
        generator = torch.Generator().manual_seed(self.recipe.seed * 1_000_003 + self.progress.step)
        weights = {name: p.to(torch.bfloat16) for name, p in self.weights.items()}
        deadline, dropout = self._dropout(batch, generator)
        logits = forward(weights, self.shape, batch.ids, batch.positions, deadline, dropout)
        scored = batch.targets >= 0
        logits, targets = logits[scored].float(), batch.targets[scored]
        loss = F.cross_entropy(logits, targets)
        for optimizer, rate in zip(self.optimizers, (self.recipe.muon, self.recipe.adam), strict=True):
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = rate * self._schedule()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.weights.values(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.progress.note(float(loss.detach()), _accuracy(logits.detach(), targets, batch.kinds[scored]), batch.tokens)

    def _schedule(self) -> float:
        """Learning rate, as a share of the recipe's: up over 50 steps, flat, down to zero."""
        step, steps = self.progress.step, self.recipe.steps
        return min(1.0, (step + 1) / 50, (steps - step) / max(1.0, self.recipe.decay * steps))

    def _dropout(self, batch: Batch, generator: torch.Generator) -> tuple[Tensor | None, Dropout | None]:
        kind = self.recipe.dropout
        if kind == "none" or torch.rand((), generator=generator) >= self.recipe.share:
            return None, None
        if kind == "attention":
            rate = self.recipe.rates[int(torch.randint(len(self.recipe.rates), (), generator=generator))]
            if rate not in self._dropouts:
                fixed = torch.Generator().manual_seed(self.recipe.seed)
                self._dropouts[rate] = Dropout.make(rate, fixed)
            return None, Dropout(rate, self._dropouts[rate].pool, generator)
        return lifetimes(batch, self.shape.layers, self.shape.kv_heads, kind == "kv", generator), None

    def _forget_later_lines(self) -> None:
        """The log goes on where the state does: steps after the last save are done again."""
        log = self.folder / "log.jsonl"
        if log.exists():
            lines = log.read_text().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith("\n")]
            write_text(log, "".join(line for line in whole if json.loads(line)["step"] <= self.progress.step))

    def _log(self) -> None:
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(asdict(self.progress)) + "\n")

    def save(self) -> None:
        """Write the state; a reader sees the old one or the new one."""
        save_state(self.folder / "state.safetensors", self.weights, self.optimizers, asdict(self.progress))


def _accuracy(logits: Tensor, targets: Tensor, kinds: Tensor) -> dict[str, float]:
    """Share of right tokens by what it takes to predict them."""
    right = (logits.argmax(-1) == targets).float()
    counts = torch.bincount(kinds.int(), minlength=len(Kind)).tolist()
    sums = torch.bincount(kinds.int(), weights=right, minlength=len(Kind)).tolist()
    return {kind.name: sums[kind] / counts[kind] for kind in Kind if counts[kind]}
