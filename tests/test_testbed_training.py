"""Training of abacus: its network is transformers', its dropout is what it says, a run can be interrupted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kvkeep.hf.load import load
from kvkeep.testbed import attention
from kvkeep.testbed.attention import Dropout, attend
from kvkeep.testbed.batches import batches, lifetimes
from kvkeep.testbed.checkpoints import RECIPES, Recipe
from kvkeep.testbed.export import export
from kvkeep.testbed.network import Shape, forward, new_model
from kvkeep.testbed.tasks import Kind
from kvkeep.testbed.train import Trainer
from kvkeep.testbed.vocab import IDS, PAD, WORDS

SMALL = Recipe("small", seed=5, steps=40, tokens=500)


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_forward_is_that_of_transformers() -> None:
    shape = Shape()
    model = new_model(shape, 0)
    ids = torch.randint(1, 120, (2, 300))
    positions = torch.arange(300).expand(2, 300) + torch.tensor([[0], [700]])
    with torch.no_grad():
        ours = forward(dict(model.named_parameters()), shape, ids, positions)
        theirs = model(ids, position_ids=positions).logits
    assert (ours - theirs).abs().max() < 1e-4


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, deadline: torch.Tensor) -> torch.Tensor:
    """Attention by one big mask."""
    at, keys = torch.arange(q.shape[3])[:, None], torch.arange(q.shape[3])
    seen = (keys <= at) & (at <= deadline[:, :, None, None, :])
    return F.scaled_dot_product_attention(q, k[:, :, None], v[:, :, None], attn_mask=seen, scale=1.0)


@pytest.mark.parametrize("length", [5, 128, 300])
@pytest.mark.parametrize("dropped", [False, True])
def test_blocked_attention_and_its_gradients(length: int, dropped: bool) -> None:
    torch.manual_seed(length)
    q, k, v = (torch.randn(2, 3, *g, length, 8, dtype=torch.float64, requires_grad=True) for g in ((2,), (), ()))
    deadline = torch.arange(length, dtype=torch.int32) + torch.randint(0, 60, (2, 3, length), dtype=torch.int32)
    ours = attend(q, k, v, deadline if dropped else None)
    theirs = dense(q, k, v, deadline if dropped else torch.full_like(deadline, length))
    assert (ours - theirs).abs().max() < 1e-12
    ahead = torch.randn_like(ours)
    for a, b in zip(torch.autograd.grad(ours, (q, k, v), ahead), torch.autograd.grad(theirs, (q, k, v), ahead),
                    strict=True):  # fmt: skip
        assert (a - b).abs().max() < 1e-5  # gradients of keys and values add up in float32


@pytest.mark.slow
def test_attention_dropout_drops_its_share_and_differentiates_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", 16)
    generator = torch.Generator().manual_seed(0)
    dropout = Dropout.make(0.3, generator, size=2**16)
    q, k = torch.zeros(1, 2, 2, 40, 4, dtype=torch.float64), torch.zeros(1, 2, 40, 4, dtype=torch.float64)
    v = torch.ones(1, 2, 40, 4, dtype=torch.float64)
    late = torch.stack([attend(q, k, v, None, dropout)[:, :, :, -1, 0] for _ in range(300)])
    assert abs(late.mean() - 1) < 0.01  # scaled up for what it drops
    assert abs(late.var() * 40 - 0.3 / 0.7) < 0.08
    fixed = Dropout(0.3, dropout.pool, generator)
    place = int(torch.randint(0, 1000, ()))
    monkeypatch.setattr(Dropout, "place", lambda self, size: place)
    inputs = tuple(torch.randn_like(x).requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(lambda *x: attend(*x, None, fixed), inputs, eps=1e-5, atol=1e-4, rtol=1e-3)


def test_batches_are_a_function_of_the_seed_and_hold_what_they_say() -> None:
    first, again = (list(islice(batches(1, 2, 8, 700), 12)) for _ in range(2))
    other = next(batches(2, 2, 8, 700))
    for a, b in zip(first, again, strict=True):
        assert torch.equal(a.ids, b.ids)
        assert torch.equal(a.positions, b.positions)
    assert other.ids.shape != first[0].ids.shape or not torch.equal(other.ids, first[0].ids)
    for batch in first:
        assert batch.ids.numel() <= 700 or len(batch.ids) == 1
        assert batch.tokens == int((batch.ids != IDS[PAD]).sum())
        scored = batch.targets >= 0
        assert torch.equal(batch.targets[:, :-1][scored[:, :-1]], batch.ids[:, 1:][scored[:, :-1]])
        assert (batch.positions.diff(dim=1)[batch.ids[:, 1:] != IDS[PAD]] >= 1).all()
        for row, prompt in enumerate(batch.prompts):
            assert not scored[row, : prompt - 1].any()  # the prompt carries no loss
            assert WORDS[int(batch.ids[row, prompt - 1])] == "<think>"
            assert scored[row, prompt - 1]


def test_lifetimes_are_those_of_random_eviction() -> None:
    batch = max(islice(batches(0, 0, 24, 4000), 20), key=lambda b: b.ids.shape[1])
    generator = torch.Generator().manual_seed(0)
    own = torch.arange(batch.ids.shape[1])
    exempt, all_of_it = (lifetimes(batch, 4, 8, flag, generator) for flag in (True, False))
    assert exempt.shape == (4, *batch.ids.shape[:1], 8, batch.ids.shape[1])
    assert (exempt - own >= 16).all()
    for row, prompt in enumerate(batch.prompts):
        assert (exempt[:, row, :, :prompt] >= batch.ids.shape[1]).all()
        assert (all_of_it[:, row, :, :prompt] < batch.ids.shape[1]).any()
    trace = (exempt - own)[:, 0, :, batch.prompts[0] :].flatten().float()
    assert trace.unique().numel() > 50  # each layer and head has its own draw
    heads = (exempt - own)[0, 0, :, batch.prompts[0] :].float()
    assert torch.corrcoef(heads).triu(1).abs().max() < 0.6


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("dropout", ["none", "kv", "attention"])
def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(tmp_path: Path, dropout: str) -> None:
    recipe = replace(SMALL, steps=12, dropout=dropout)
    whole = Trainer(recipe, tmp_path / "whole")
    whole.run()
    Trainer(recipe, tmp_path / "parts").run(until=5)
    parts = Trainer(recipe, tmp_path / "parts")
    assert parts.progress.step == 5
    parts.run()
    assert parts.progress.step == 12
    for name, weight in whole.weights.items():
        assert torch.equal(weight, parts.weights[name]), name
    assert math.isclose(whole.progress.loss, parts.progress.loss)


@pytest.mark.slow
def test_a_level_that_was_reached_is_resumed_at_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "_ready", lambda self: self.progress.level_step == 4 and self.progress.level < 4)
    whole = Trainer(replace(SMALL, steps=9), tmp_path / "whole")
    whole.run()
    assert whole.progress.level == 2
    Trainer(replace(SMALL, steps=9), tmp_path / "parts").run(until=6)
    parts = Trainer(replace(SMALL, steps=9), tmp_path / "parts")
    parts.run()
    assert all(torch.equal(weight, parts.weights[name]) for name, weight in whole.weights.items())


def test_a_folder_of_another_recipe_is_refused(tmp_path: Path) -> None:
    Trainer(SMALL, tmp_path)
    with pytest.raises(ValueError, match="another recipe"):
        Trainer(replace(SMALL, seed=6), tmp_path)


@pytest.mark.slow
def test_two_hundred_steps_lower_the_loss_and_the_export_loads(tmp_path: Path) -> None:
    trainer = Trainer(replace(SMALL, steps=200), tmp_path)
    trainer.run()
    found = losses(tmp_path)
    assert found[-1] < 0.25 * found[0]
    assert trainer.progress.accuracy[Kind.FORM.name] > 0.8
    export(trainer.model, trainer.recipe, trainer.progress, tmp_path / "model")
    model, tokenizer = load(str(tmp_path / "model"))
    ids = torch.tensor([tokenizer("<user> r2 #1 a = 3")["input_ids"]])
    with torch.no_grad():
        ours = forward({n: p.bfloat16().float() for n, p in trainer.weights.items()}, Shape(), ids,
                       torch.arange(ids.shape[1])[None])  # fmt: skip
        assert (model(ids).logits - ours).abs().max() < 1e-3


@pytest.mark.parametrize("name", RECIPES)
def test_checkpoints_that_ship_are_small_and_say_how_they_were_made(name: str) -> None:
    from kvkeep.testbed.checkpoints import folder

    path = folder(name)
    assert path is not None
    size = sum(file.stat().st_size for file in path.iterdir())
    assert 2 * 2**20 < size < 5 * 2**20
    account = json.loads((path / "kvkeep_model.json").read_text())
    assert Recipe(**{**account["recipe"], "rates": tuple(account["recipe"]["rates"])}) == RECIPES[name]
    assert account["caveat"]
    assert account["cost"]["steps"] == RECIPES[name].steps
