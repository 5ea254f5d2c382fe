"""Regressions of the cache: foreign attention, masks, interruptions, threads, dropped caches, bytes.

What policies, the engine door and the command line once got wrong is in test_hf_robust2.py.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as memoize
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
)

import kvkeep
from kvkeep.hf import rounds
from kvkeep.hf.model import Unsupported
from kvkeep.policies import Policy, registry
from kvkeep.policies.base import PolicyScope
from kvkeep.signals import POSITIONS, RoundView
from masked import Rule, check_row, close, force, taped
from models import CACHE, NO_END, VOCAB, counted, generate, left_pad, prompt, step, tiny
from test_hf_forwards import hooks
from test_hf_turns import converse

K, R = 24, 4


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies of these tests are known only while they run."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


def evict(model: Any, policy: Any = "random", **values: Any) -> Any:
    return kvkeep.evict(model, policy, **{"budget": K, "buffer": R, "seed": 7, **values})


def bools(positions: list[int], rows: int = 1) -> Tensor:
    """A mask [rows, 1, 1, T] that is True at ``positions``."""
    mask = torch.zeros(rows, 1, 1, 80, dtype=torch.bool)
    mask[..., positions] = True
    return mask


# ---- attention that takes the cache by another name, or in another shape ---------------------------


def _sizes(**values: Any) -> dict[str, Any]:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    return {**sizes, "max_position_embeddings": 512, "initializer_range": 0.15, **NO_END, **values}


def _falcon(**values: Any) -> PreTrainedModel:
    plain = {"multi_query": False, "new_decoder_architecture": False, "alibi": False}
    return FalconForCausalLM(FalconConfig(**_sizes(**{**plain, **values})))


FOREIGN: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_sizes(intermediate_size=48))),
    "falcon": _falcon,
    "falcon-grouped": lambda: _falcon(new_decoder_architecture=True, num_kv_heads=2),
}


@memoize
def foreign(family: str) -> PreTrainedModel:
    """A model whose attention is given the cache as ``layer_past=``; the reference finds its attention, too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FOREIGN[family]().eval()
    model.generation_config.do_sample = False
    layers = model.gpt_neox.layers if family == "gpt-neox" else model.transformer.h
    attention = [getattr(layer, "attention", None) or layer.self_attention for layer in layers]
    model.model = SimpleNamespace(layers=[SimpleNamespace(self_attn=module) for module in attention])
    return model


@pytest.mark.parametrize("family", FOREIGN)
def test_a_padded_batch_where_attention_gets_layer_past(family: str) -> None:
    """Its masks were lost: the hook looked for the cache among the attention's arguments."""
    model, rows = foreign(family), [prompt(13), prompt(6)]
    batch = left_pad(rows)
    with evict(model, track_positions=True) as cache, taped(model, cache) as frames:
        found = generate(model, cache, batch["input_ids"], 30, attention_mask=batch["attention_mask"])
        kept = [cache.kept_positions(i) for i in range(2)]
    for i, ids in enumerate(rows):
        n = ids.shape[1]
        assert check_row(model, frames, found.sequences[i : i + 1, 13 - n :], Rule(K, R, R, share=1), n, i, 13) >= 2
        with evict(model) as cache:
            alone = generate(model, cache, ids, 30)
            assert torch.equal(cache.kept_positions(), kept[i])
        assert torch.equal(found.sequences[i, 13:], alone.sequences[0, n:])
        close(torch.stack(found.logits)[:, i], torch.stack(alone.logits)[:, 0])


@pytest.mark.parametrize("family", FOREIGN)
def test_a_second_turn_where_attention_gets_layer_past(family: str) -> None:
    """A turn lies among older entries, which also needs a mask of its own."""
    model, rule = foreign(family), Rule(40, R, R, share=1)
    with evict(model, budget=40, track_positions=True) as cache:
        frames, ids, turns = converse(model, cache, left_pad([prompt(11)]), [50, 30], [7])
    assert check_row(model, frames, ids, rule, 11, turns=turns) >= 8


def test_a_model_with_other_kv_heads_than_its_configuration_says() -> None:
    """Falcon's multi-query attention stores one head, its configuration says 4: refused before a token comes out."""
    model = _falcon(multi_query=True).eval()
    with counted(model) as forwards:
        with evict(model) as cache, pytest.raises(Unsupported, match="1 KV heads, the model's configuration says 4"):
            generate(model, cache, prompt(11), 30)
        assert not forwards


@pytest.mark.parametrize("family", ["bloom", "falcon"])
def test_alibi_is_refused(family: str) -> None:
    """ALiBi counts distances in slots, which eviction changes."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    model = BloomForCausalLM(BloomConfig(**sizes, **NO_END)) if family == "bloom" else _falcon(alibi=True)
    with pytest.raises(Unsupported, match=r"ALiBi.*rotary"), evict(model):
        pass
    assert hooks(model) == 0


# ---- masks of probes ----------------------------------------------------------------------------


def test_an_override_after_the_prompt_that_asks_for_too_much() -> None:
    """Beside 11 prompt tokens and a window of 4 there is room for 9: refused at once, not in some later round."""
    model, ids = tiny("llama"), prompt(70, seed=4)
    with evict(model) as cache:
        step(model, cache, ids[:, :11])
        with pytest.raises(ValueError, match="ask for 10 entries of a head beside 11 protected"):
            cache.override(keep=bools([*range(12, 22)]))
        cache.override(keep=bools([*range(12, 21)]))
        for t in range(11, 70):
            step(model, cache, ids[:, t : t + 1])
        assert bool((cache.kept_positions()[..., :20] == torch.tensor([*range(11), *range(12, 21)])).all())


def test_a_refused_override_leaves_the_masks_as_they_were() -> None:
    """A refusal leaves no trace: the masks that were set before go on."""
    model, ids = tiny("llama"), prompt(70, seed=4)
    with evict(model, keep=bools([13, 17])) as expected:
        force(model, expected, ids, 11)
    with evict(model, keep=bools([13, 17])) as cache:
        step(model, cache, ids[:, :11])
        with pytest.raises(ValueError, match="ask for 10"):
            cache.override(keep=bools([*range(12, 22)]))
        for t in range(11, 70):
            step(model, cache, ids[:, t : t + 1])
        assert torch.equal(cache.kept_positions(), expected.kept_positions())


def test_kept_and_pinned_entries_are_counted_together() -> None:
    """5 pins leave room for 4 more; what is both pinned and kept counts once. The user's mask is not touched."""
    model, ids, given = tiny("llama"), prompt(70, seed=4), bools([*range(15, 20), 21, 22, 23, 25])
    with evict(model, protect="prompt+pin:15-20", keep=bools([21, 22, 23, 25, 26])) as cache:
        with counted(model) as forwards, pytest.raises(ValueError, match="keep and pins ask for 10 entries"):
            step(model, cache, ids[:, :11])
        assert not forwards
    for keep in (given, bools([21, 22, 23, 25])):
        before = keep.clone()
        with evict(model, protect="prompt+pin:15-20", keep=keep) as cache:
            force(model, cache, ids, 11)
            wanted = [*range(11), *range(15, 20), 21, 22, 23, 25]
            assert bool((cache.kept_positions()[..., :20] == torch.tensor(wanted)).all())
        assert torch.equal(keep, before)


def test_a_turn_that_cannot_hold_what_is_kept() -> None:
    """26 protected entries, 14 kept ones and a window of 4 do not fit into 40; without the mask they would."""
    model, ids = tiny("llama"), prompt(90, seed=4)
    with evict(model, budget=40, keep=bools([*range(12, 26)])) as cache, evict(model, budget=40) as free:
        for used in (cache, free):
            force(model, used, ids[:, :60], 11)
        before, kept = cache.stats(), cache.kept_positions()
        with cache.as_prompt(), counted(model) as forwards, pytest.raises(ValueError, match="keep and pins ask for 14"):
            step(model, cache, ids[:, 60:75])
        assert not forwards
        assert cache.stats() == before
        assert torch.equal(cache.kept_positions(), kept)
        step(model, cache, ids[:, 60:61])
        with free.as_prompt():
            step(model, free, ids[:, 60:75])


def test_masks_after_beam_search_and_reset() -> None:
    """Beams carry their masks along; the next request begins with those that were set."""
    model, ids = tiny("llama"), torch.cat([prompt(11), prompt(11, seed=1)])
    keep = bools([], rows=4)
    for row in range(4):
        keep[row, ..., 12 + row] = True
    forced = torch.cat([prompt(11, seed=2), prompt(50, seed=4)], dim=1).expand(4, -1)
    with evict(model, keep=keep) as fresh:
        force(model, fresh, forced, 11)
    with evict(model, keep=keep) as cache:
        generate(model, cache, ids, 30, num_beams=2)
        assert not torch.equal(cache._rounds.masks.keep, keep), "no beam changed its place: the test tests nothing"
        cache.reset()
        force(model, cache, forced, 11)
        for row in range(4):
            assert torch.equal(cache.kept_positions(row), fresh.kept_positions(row))
            assert bool((cache.kept_positions(row) == 12 + row).any(-1).all())


# ---- interruptions ------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", [False, True])
def test_an_interrupt_in_the_middle_of_the_moves(turn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some layers have moved, others have not: the cache must not go on, but reset() makes it new."""
    model, ids, calls = tiny("llama"), prompt(90, seed=4), list[int]()

    def interrupted(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        moved(*args)

    moved = rounds.move_entries
    with evict(model, budget=40) as cache:
        force(model, cache, ids[:, :44], 11)
        cache._mode = "prompt" if turn else None
        with monkeypatch.context() as patch:
            patch.setattr(rounds, "move_entries", interrupted)
            with pytest.raises(KeyboardInterrupt):
                step(model, cache, ids[:, 44 : 52 if turn else 45])
        assert len(calls) == 4
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"call reset\(\)"):
                step(model, cache, ids[:, 44:45])
        cache.reset()
        frames = force(model, cache, ids, 11)
        with evict(model, budget=40) as fresh:
            expected = force(model, fresh, ids, 11)
            assert torch.equal(cache.kept_positions(), fresh.kept_positions())
    assert all(torch.equal(a.logits, b.logits) for a, b in zip(frames, expected, strict=True))


def test_training_with_gradient_checkpointing() -> None:
    """transformers drops the cache there, so nothing was stored and later tokens saw no prompt."""
    model = copy.deepcopy(tiny("llama"))
    model.train()
    model.gradient_checkpointing_enable()
    with evict(model) as cache:
        assert torch.is_grad_enabled()
        with pytest.raises(RuntimeError, match=r"gradient checkpointing.*model\.eval\(\)"):
            model(input_ids=prompt(9), use_cache=True, **{CACHE: cache})
        model.eval()
        cache.reset()
        found = generate(model, cache, prompt(9), 30)
    with evict(tiny("llama")) as cache:
        assert torch.equal(found.sequences, generate(tiny("llama"), cache, prompt(9), 30).sequences)


# ---- prompt_length ------------------------------------------------------------------------------


def test_a_long_prompt_and_its_trace_in_one_forward() -> None:
    """40 unprotected tokens must be cut down to K before any trace: room in the round to come does not count."""
    model, ids = tiny("llama"), prompt(70, seed=4)
    with evict(model, protect="none") as expected:
        force(model, expected, ids, 40)
    with evict(model, protect="none", prompt_length=40) as cache:
        with counted(model) as forwards, pytest.raises(ValueError, match="at most 0 fit now"):
            step(model, cache, ids[:, :42])
        assert not forwards
        force(model, cache, ids, 40)  # the refusal left no trace
        assert cache.stats()["rounds"] == expected.stats()["rounds"]
        assert torch.equal(cache.kept_positions(), expected.kept_positions())


@pytest.mark.parametrize("together", [21, 24, 28])
def test_a_prompt_and_a_trace_that_fit_in_one_forward(together: int) -> None:
    """As if they came apart: the same rounds, kept sets and logits."""
    model, ids = tiny("llama"), prompt(70, seed=4)
    with evict(model, protect="none") as apart:
        expected = torch.cat([f.logits for f in force(model, apart, ids, 20)], dim=1)
    with evict(model, protect="none", prompt_length=20) as cache:
        found = torch.cat([f.logits for f in force(model, cache, ids, together)], dim=1)
        assert cache.stats()["prompt"] == [20]
        assert cache.stats()["rounds"] == apart.stats()["rounds"]
        assert torch.equal(cache.kept_positions(), apart.kept_positions())
    close(found, expected)


# ---- kept positions -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Fickle(Policy):
    """Scores otherwise at every call, as scores of keys or queries would: rounds cannot be replayed."""

    name: ClassVar[str] = "fickle"
    calls: ClassVar[list[int]] = []

    @property
    def scope(self) -> PolicyScope:
        return "head"

    def score(self, view: RoundView) -> Tensor:
        type(self).calls.append(len(view.streams))
        shape = (len(view.streams), len(view.layers), len(view.heads), view.candidates)
        return torch.rand(shape, generator=torch.Generator().manual_seed(len(self.calls)))


@dataclass(frozen=True)
class FickleOnPositions(Fickle):
    """The same, and it sees positions."""

    name: ClassVar[str] = "fickle-positions"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS})
    calls: ClassVar[list[int]] = []


@pytest.mark.parametrize("policy", [Fickle, FickleOnPositions])
def test_positions_of_a_policy_that_reads_content(policy: type[Fickle]) -> None:
    """They are tracked: reading them asks for no scores, and says what is really in the cache."""
    model, ids = tiny("llama"), prompt(60, seed=4)
    with evict(model, policy()) as cache:
        frames = force(model, cache, ids, 11)
        asked = len(policy.calls)
        first, second = cache.kept_positions(), cache.kept_positions()
        assert torch.equal(first, second)
        assert len(policy.calls) == asked > 0
        assert cache.stats()["bytes"]["positions"] > 0
    assert check_row(model, frames, ids, Rule(K, R, R, share=1), 11) >= 6


def test_positions_of_rows_that_are_not_there() -> None:
    """-1 is not the last row: it read the first row's draws."""
    model, batch = tiny("llama"), left_pad([prompt(11), prompt(7)])
    for track in (False, True):
        with evict(model, track_positions=track) as cache:
            generate(model, cache, batch["input_ids"], 30, attention_mask=batch["attention_mask"])
            for row in (-1, 2, 5):
                with pytest.raises(ValueError, match=f"no row {row}: the cache holds 2 rows"):
                    cache.kept_positions(row)


# ---- caches that are dropped, copied or shared between threads --------------------------------------


def test_a_dropped_cache_frees_its_entries_at_once() -> None:
    """Without the garbage collector, which may run long after the memory was needed."""
    model = tiny("llama")
    gc.collect()
    gc.disable()
    try:
        cache = kvkeep.Settings.of("random", budget=K, buffer=R).cache(model)
        for i in range(40):
            step(model, cache, prompt(9) if i == 0 else prompt(1))
        entries = [weakref.ref(layer.k) for layer in cache.evicting]
        assert all(ref() is not None for ref in entries)
        del cache
        assert all(ref() is None for ref in entries)
        assert hooks(model) == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("where", ["before the decoder", "before attention", "after the decoder"])
def test_a_cache_dropped_in_the_middle_of_a_forward(where: str) -> None:
    """torch calls hooks that were just removed once more, without keyword arguments."""
    model, ids = tiny("llama"), prompt(9)
    with torch.no_grad():
        clean = model(ids).logits
    held = [kvkeep.Settings.of("random", budget=K, buffer=R).cache(model)]
    step(model, held[0], ids)

    def drop(*args: Any) -> None:
        held.clear()
        gc.collect()

    module = model.model.layers[1].self_attn if where == "before attention" else model.base_model
    register = module.register_forward_hook if where == "after the decoder" else module.register_forward_pre_hook
    handle = register(drop, prepend=True)
    try:
        with torch.no_grad():
            assert torch.equal(model(ids).logits, clean)
        assert not held
    finally:
        handle.remove()
    assert hooks(model) == 0


def test_caches_that_are_never_closed() -> None:
    """A loop over requests makes a cache each time; the last one's cycle is collected in the next one's forward."""
    model, ids, due = tiny("llama"), prompt(9), list[bool]()
    with evict(model, seed=0) as cache:
        expected = generate(model, cache, ids, 30).sequences

    def collect(*args: Any) -> None:
        if due:
            due.clear()
            gc.collect()

    handle = model.base_model.register_forward_pre_hook(collect, prepend=True)
    gc.disable()
    try:
        for _ in range(4):
            cache = kvkeep.Settings.of("random", budget=K, buffer=R).cache(model)
            cache.friends = [cache]  # a user's cycle
            due.append(True)
            assert torch.equal(generate(model, cache, ids, 30).sequences, expected)
        del cache
    finally:
        gc.enable()
        handle.remove()
    gc.collect()
    assert hooks(model) == 0


def test_a_cache_cannot_be_copied() -> None:
    """The copy would share the model's hooks, which know only the original."""
    model = tiny("llama")
    with evict(model) as cache:
        step(model, cache, prompt(9))
        with pytest.raises(Unsupported, match="cannot be copied"):
            copy.deepcopy(cache)
        step(model, cache, prompt(1))  # the original goes on


def test_two_threads_on_one_model() -> None:
    """A padded batch and a single row, in lockstep: each forward is under way while the other's hooks run."""
    model, batches = tiny("llama"), [left_pad([prompt(13), prompt(6)]), left_pad([prompt(9, seed=1)])]

    def run(batch: dict[str, Tensor]) -> tuple[Any, list[Tensor]]:
        with evict(model) as cache:
            found = generate(model, cache, batch["input_ids"], 30, attention_mask=batch["attention_mask"])
            return found, [cache.kept_positions(i) for i in range(len(batch["input_ids"]))]

    alone, barrier = [run(batch) for batch in batches], threading.Barrier(2, timeout=30)
    found: dict[int, tuple[Any, list[Tensor]]] = {}
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            found[i] = run(batches[i])
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    def meet(*args: Any) -> None:
        barrier.wait()

    handles = [layer.register_forward_pre_hook(meet) for layer in model.model.layers]
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for handle in handles:
            handle.remove()
    real = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    assert not errors, real or errors
    for i, (expected, kept) in enumerate(alone):
        assert torch.equal(found[i][0].sequences, expected.sequences)
        assert all(map(torch.equal, found[i][1], kept))
        close(torch.stack(found[i][0].logits), torch.stack(expected.logits))


# ---- bytes --------------------------------------------------------------------------------------


def reachable(cache: Any) -> int:
    """Bytes of all entries that the cache's layers hold on to, by whatever name (sliding layers count in integers)."""
    tensors = [t for layer in cache.layers for t in vars(layer).values() if isinstance(t, Tensor)]
    entries = [t.untyped_storage() for t in tensors if t.is_floating_point()]
    return sum({s.data_ptr(): s.nbytes() for s in entries}.values())


@pytest.mark.parametrize("policy", ["random", "full"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_bytes_are_those_of_everything_that_is_held(family: str, policy: str) -> None:
    """A padded prefill hands attention a copy, which must be neither kept nor left out of the count."""
    model, batch = tiny(family), left_pad([prompt(19), prompt(7)])
    values: dict[str, Any] = {} if policy == "full" else {"budget": K, "buffer": R, "track_positions": True}
    with kvkeep.evict(model, policy, **values) as cache:
        positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
        step(model, cache, batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=positions)
        assert cache.nbytes() == cache.stats()["bytes"]["entries"] == reachable(cache) > 0
        cache.reset()
        generate(model, cache, batch["input_ids"], 20, attention_mask=batch["attention_mask"])
        found, store = cache.stats()["bytes"], cache._rounds.store
        assert cache.nbytes() == found["entries"] == reachable(cache)
        assert found["positions"] == (0 if store is None else store.data.untyped_storage().nbytes())
        assert (policy == "full") == (found["positions"] == 0)
        assert found["now"] == found["entries"] + found["positions"] + found["policy"] <= found["peak"]


def test_slack_of_the_full_cache() -> None:
    """What every method is measured against must not be made to look large: 1/16 and 128 slots at most."""
    model, ids = tiny("llama"), prompt(500)
    with kvkeep.evict(model, "full") as cache:
        for first, end in [(0, 300), *((t, t + 1) for t in range(300, 440)), (440, 500)]:
            with cache.as_trace() if first else cache.as_prompt():
                step(model, cache, ids[:, first:end])
            slot = 2 * 3 * 2 * 8 * 4  # keys and values of 3 layers, 2 heads, 8 float32
            assert end * slot <= cache.nbytes() <= (end * 17 / 16 + 128) * slot
