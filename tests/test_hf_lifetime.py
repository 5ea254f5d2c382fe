"""Regressions of the cache: caches that are dropped, copied or shared between threads, and their bytes."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import kvkeep
from kvkeep.hf.model import Unsupported
from masked import close
from models import generate, left_pad, prompt, step, tiny
from small import K, R, evict
from test_hf_forwards import hooks

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
