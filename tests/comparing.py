"""What the tests of comparisons share: a tiny random abacus model, and a task that needs no model at all."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvkeep.evals import engines, tasks
from kvkeep.evals.arms import parse_arms
from kvkeep.evals.config import Config, Primary
from kvkeep.evals.engines import Backend
from kvkeep.evals.run import Run, execute, prepare
from kvkeep.evals.spelling import canonical
from kvkeep.evals.task import Item, Outcome
from kvkeep.testbed.vocab import EOS, IDS, PAD, VOCABULARY, tokenizer

torch.set_num_threads(1)

#: Fields that depend on when a session ran and how fast the machine was.
WALL_CLOCK = ("seconds", "seconds_per_problem", "seconds_per_solved", "environment")


def save_tiny_abacus(folder: Path, **values: Any) -> Path:
    """A random model with abacus's vocabulary."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
        "initializer_range": 0.15,
        "pad_token_id": IDS[PAD],
        "eos_token_id": IDS[EOS],
        "bos_token_id": None,
        **values,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@cache
def _folder(root: Path) -> Path:
    return save_tiny_abacus(root)


@pytest.fixture(scope="session")
def abacus_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random abacus model."""
    return _folder(tmp_path_factory.mktemp("abacus-model"))


@dataclass(frozen=True)
class Fake:
    """Scores that depend on arm, problem and run alone.

    Args:
        fail: a problem whose run raises.
        skip: this share of the samples ends before a round ran.
        drift: share of the samples whose trace depends on the batch.
        reverse: problems come in the opposite order.
        lengths: prompts of this many different lengths.
        temperature: above 0 tokens would be sampled.
        kl: the score is a divergence without bounds, 0 for the full cache.
    """

    fail: str = ""
    skip: float = 0.0
    drift: float = 0.0
    reverse: bool = False
    lengths: int = 1
    temperature: float = 0.0
    kl: bool = False

    @property
    def metric(self) -> str:
        return "kl" if self.kl else "accuracy"

    @property
    def bounds(self) -> tuple[float, float] | None:
        return None if self.kl else (0.0, 1.0)

    @property
    def higher_is_better(self) -> bool:
        return not self.kl

    @property
    def name(self) -> str:
        return canonical("fake", self)

    def items(self, tokenizer: Any, count: int, seed: int) -> list[Item]:
        made = [Item(f"p{i}", tuple(range(2, 12 + i % self.lengths)), 100, i) for i in range(count)]
        return made[::-1] if self.reverse else made

    def run(self, engine: Any, items: Sequence[Item], samples: Sequence[int], seed: int) -> list[Outcome]:
        return [self._one(engine.settings, item, run, len(items)) for item, run in zip(items, samples, strict=True)]

    def _one(self, settings: Any, item: Item, run: int, rows: int) -> Outcome:
        if item.id == self.fail:
            raise ArithmeticError("the sky fell")
        evicts = settings.budget is not None
        protects = settings.protect != "none"
        luck = draw(f"{settings.policy} {settings.protect} {item.id} {run}")
        rounds = 4 if evicts and draw(f"skip {item.id} {run}") >= self.skip else 0
        text = f"trace of {item.id} {run}" + (f" {rows}" if draw(f"drift {item.id}") < self.drift else "")
        held = min(settings.budget or 100, 100)
        stats = {
            "rounds": rounds,
            "evicted": 10 * rounds,
            "mean_entries": held * 0.9,
            "peak_entries": held,
            "mean_bytes": held * 64.0,
            "peak_bytes": held * 70.0,
        }
        right = luck < (0.95 if not evicts else 0.8 if protects else 0.1)
        tokens = 90 - (item.data or 0) % 3 if evicts else 90
        if self.kl:
            return Outcome(luck * evicts, True, False, tokens, "", stats, {"nll": 1 + luck, "nll_full": 1.0})
        return Outcome(float(right), luck < 0.97, luck > 0.99, tokens, text, stats, {"steps": luck})


def draw(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32


class FakeLoaded:
    """A model that is not there."""

    tokenizer = None

    def engine(self, settings: Any) -> Any:
        return type("FakeEngine", (), {"settings": settings})()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine ``fake`` and the task ``fake``, for runs inside the test's process."""
    monkeypatch.setitem(engines.ENGINES, "fake", lambda name, backend: FakeLoaded())
    monkeypatch.setitem(tasks.BUILT_IN, "fake", "comparing:Fake")


def fake_config(model: Path, *policies: str, primary: Sequence[str] = (), **values: Any) -> Config:
    """A comparison that takes milliseconds."""
    arms = parse_arms(policies or ("full", "random", "random:protect=none", "recency"))
    labels = [arm.label for arm in arms]
    given: dict[str, Any] = {
        "models": (str(model),), "tasks": ("fake",), "compressions": (2.0, 4.0), "buffer": 4, "problems": 20,
        "batch": 6, "backend": Backend("fake"), **values,
    }  # fmt: skip
    return Config(arms=arms, primary=tuple(Primary.parse(text, labels) for text in primary), **given)


def run_here(config: Config, folder: Path, **values: Any) -> Run:
    """Prepare and execute in this process."""
    return execute(prepare(config), folder, workers=0, **values)


def without_clock(value: Any) -> Any:
    """A JSON value without its wall-clock fields."""
    if isinstance(value, dict):
        return {k: without_clock(v) for k, v in value.items() if k not in WALL_CLOCK}
    return [without_clock(v) for v in value] if isinstance(value, list) else value
