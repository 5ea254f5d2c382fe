"""Bare forwards with the cache: chunks of the trace, failures halfway, several caches, probes' masks."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import kvkeep
from masked import Rule, check_row, close, force, taped
from models import CACHE, FAMILIES, evicting_layers, generate, left_pad, prompt, step, tiny

K, R = 24, 4


def evict(model: Any, **values: Any) -> Any:
    return kvkeep.evict(model, **{"budget": K, "buffer": R, "seed": 7, **values})


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def padded(lengths: list[int], first: int, end: int) -> dict[str, Tensor]:
    """Mask and positions of the columns [first, end) of left-padded rows, as a user passes them."""
    longest = max(lengths)
    mask = torch.tensor([[0] * (longest - n) + [1] * (end - longest + n) for n in lengths])
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, first:]
    return {"attention_mask": mask, "position_ids": positions}


# ---- several trace tokens at once ---------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3"])
@pytest.mark.parametrize("lengths", [[11], [13, 6, 9]])
def test_trace_chunks_equal_single_steps(family: str, lengths: list[int]) -> None:
    """Chunks as long as fit: the same kept sets and, against the reference, the same logits."""
    model, longest = tiny(family), max(lengths)
    rows = [prompt(n + 60, seed=4) for n in lengths]
    ids = torch.cat([nn.functional.pad(row, (longest - n, 0)) for row, n in zip(rows, lengths, strict=True)])
    kept, largest = [], 0
    for most in (1, 2, 99):
        with evict(model, track_positions=True) as cache, taped(model, cache) as frames:
            step(model, cache, ids[:, :longest], **padded(lengths, 0, longest))
            first = longest
            while first < ids.shape[1]:
                size = min(most, cache.trace_space(), ids.shape[1] - first)
                with cache.as_trace():
                    part = ids[:, first : first + size]
                    step(model, cache, part, **padded(lengths, first, first + size))
                first, largest = first + size, max(largest, size)
            kept.append([cache.kept_positions(i) for i in range(len(lengths))])
            assert min(cache.stats()["rounds"]) >= 6
        for i, n in enumerate(lengths):
            check_row(model, frames, rows[i], Rule(K, R, R, share=1), n, i, longest)
    assert largest > 2
    assert all(torch.equal(a, b) for other in kept[1:] for a, b in zip(kept[0], other, strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_chunk_that_crosses_a_round_is_refused(family: str) -> None:
    """It names the largest size; nothing was touched, so the cache goes on with a smaller chunk."""
    model, ids = tiny(family), prompt(60, seed=4)
    with evict(model) as cache, taped(model, cache) as frames:
        step(model, cache, ids[:, :11])
        for first, size, space in ((11, 18, 17), (11, 17, 17), (28, 5, 4), (28, 3, 4), (31, 2, 1), (31, 1, 1)):
            assert cache.trace_space() == space
            with cache.as_trace():
                if size > space:
                    with pytest.raises(ValueError, match=f"at most {space} fit"):
                        step(model, cache, ids[:, first : first + size])
                else:
                    step(model, cache, ids[:, first : first + size])
        for t in range(32, 60):
            step(model, cache, ids[:, t : t + 1])
    assert check_row(model, frames, ids, Rule(K, R, R, share=1), 11) >= 6


def test_prompt_length_says_where_the_prompt_ends() -> None:
    """Inside the first forward, at its end, or beyond it: kept sets are those of the prompt and the trace apart."""
    model, ids = tiny("llama"), prompt(60, seed=4)
    with evict(model) as cache:
        frames = force(model, cache, ids, 11)
        expected = cache.kept_positions()
    logits = torch.cat([f.logits for f in frames], dim=1)
    for sizes in ([11], [20], [28], [4, 7], [4, 6, 1], [1] * 11, [10, 5]):
        with evict(model, prompt_length=11) as cache:
            found, first = [], 0
            for size in [*sizes, *[1] * (60 - sum(sizes))]:
                found.append(step(model, cache, ids[:, first : first + size]))
                first += size
            assert torch.equal(cache.kept_positions(), expected)
            assert cache.stats()["prompt"] == [11]
        close(torch.cat(found, dim=1), logits)


# ---- failures and cleaning up -------------------------------------------------------------------


class Boom(Exception):
    pass


def explode(*args: Any) -> None:
    raise Boom


@pytest.mark.parametrize("lengths", [[9], [9, 5]])
def test_a_forward_that_fails_halfway(lengths: list[int]) -> None:
    """The cache asks for reset(); the model itself, and other caches on it, must not notice."""
    model, batch = tiny("llama"), left_pad([prompt(n) for n in lengths])
    with torch.no_grad():
        clean = model(**batch, **{k: v for k, v in padded(lengths, 0, 9).items() if k == "position_ids"}).logits
    whole = generate(model, None, batch["input_ids"], 5, attention_mask=batch["attention_mask"])
    with evict(model) as cache:
        before = hooks(model)
        step(model, cache, batch["input_ids"], **padded(lengths, 0, 9))
        handle = model.model.layers[1].mlp.register_forward_pre_hook(explode)
        with pytest.raises(Boom):
            step(model, cache, batch["input_ids"][:, :1], **padded(lengths, 9, 10))
        handle.remove()
        with pytest.raises(RuntimeError, match=r"reset\(\)"):
            step(model, cache, batch["input_ids"][:, :1], **padded(lengths, 9, 10))
        assert hooks(model) == before
        with torch.no_grad():
            again = model(**batch, position_ids=padded(lengths, 0, 9)["position_ids"]).logits
        assert torch.equal(again, clean)
        with evict(model) as other:
            found = generate(model, other, batch["input_ids"], 5, attention_mask=batch["attention_mask"])
            assert torch.equal(found.sequences, whole.sequences)
        cache.reset()
        found = generate(model, cache, batch["input_ids"], 5, attention_mask=batch["attention_mask"])
        assert torch.equal(found.sequences, whole.sequences)


def test_hooks_are_gone_afterwards() -> None:
    """After the block, after an exception inside it, after close(), and when a cache is dropped."""
    model = tiny("gemma3")
    assert hooks(model) == 0
    with evict(model) as cache:
        assert hooks(model) > 0
        generate(model, cache, prompt(9), 3)
    assert hooks(model) == 0
    with pytest.raises(Boom), evict(model):
        raise Boom
    assert hooks(model) == 0
    with pytest.raises(ValueError, match="bool"), evict(model, keep=torch.ones(3)):
        pass
    assert hooks(model) == 0
    cache = kvkeep.Settings.of("random", budget=K, buffer=R).cache(model)
    cache.close()
    cache.close()
    assert hooks(model) == 0
    with pytest.raises(RuntimeError, match="only until"):
        step(model, cache, prompt(9))
    dropped = kvkeep.Settings.of("random", budget=K, buffer=R).cache(model)
    step(model, dropped, prompt(9))
    gone = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert gone() is None
    assert hooks(model) == 0


def test_two_caches_on_one_model_in_turn() -> None:
    """Each forward belongs to the cache it was given, also when they alternate token by token."""
    model, ids = tiny("llama"), [prompt(50, seed=1), prompt(50, seed=2)]
    with evict(model) as a, evict(model, seed=1, policy="recency") as b, taped(model, a) as x, taped(model, b) as y:
        for first, end in [(0, 9), *((t, t + 1) for t in range(9, 50))]:
            step(model, a, ids[0][:, first:end])
            step(model, b, ids[1][:, first:end])
    assert check_row(model, x, ids[0], Rule(K, R, R, share=1), 9) >= 5
    assert check_row(model, y, ids[1], Rule(K, R, R, share=1, newest_only=True), 9) >= 5


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_reset_is_like_a_new_cache(family: str) -> None:
    """Another prompt, another batch size; also after a prompt that was refused."""
    model = tiny(family)
    batch = left_pad([prompt(8), prompt(5)])
    with evict(model) as fresh:
        expected = generate(model, fresh, batch["input_ids"], 30, attention_mask=batch["attention_mask"])
        kept = [fresh.kept_positions(i) for i in range(2)]
    with evict(model, track_positions=True) as cache:
        generate(model, cache, prompt(14), 40)
        for refused in (False, True):
            cache.reset()
            if refused:
                with pytest.raises(ValueError, match="does not fit"):
                    generate(model, cache, prompt(40), 5)
                cache.reset()
            found = generate(model, cache, batch["input_ids"], 30, attention_mask=batch["attention_mask"])
            assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))
            assert all(torch.equal(cache.kept_positions(i), kept[i]) for i in range(2))


def test_a_refused_prompt_leaves_no_trace() -> None:
    """A refusal comes before anything is counted: the next prompt draws as in a new cache."""
    model = tiny("llama")
    with evict(model) as fresh:
        generate(model, fresh, prompt(10), 40)
    with evict(model) as cache:
        with pytest.raises(ValueError, match="does not fit"):
            generate(model, cache, prompt(40), 5)
        generate(model, cache, prompt(10), 40)
        assert cache.stats()["prompt"] == [10]
        assert torch.equal(cache.kept_positions(), fresh.kept_positions())


# ---- the rest -----------------------------------------------------------------------------------


def test_gradients_do_not_leak_into_the_cache() -> None:
    """With gradients enabled every forward works, its graph ends at the cache, and stored entries have none."""
    model, ids = tiny("llama"), prompt(40)
    assert torch.is_grad_enabled()
    with evict(model) as cache:
        for first, end in [(0, 9), *((t, t + 1) for t in range(9, 40))]:
            logits = model(input_ids=ids[:, first:end], use_cache=True, **{CACHE: cache}).logits
            assert logits.requires_grad
        for layer in cache.evicting:
            assert layer.k.grad_fn is layer.v.grad_fn is None
            assert not layer.k.requires_grad
        with evict(model) as other:
            frames = force(model, other, ids, 9)
    close(logits[:, -1].detach(), frames[-1].logits[:, -1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_half_precision_keeps_the_same(family: str, dtype: torch.dtype) -> None:
    """Kept sets do not depend on the dtype of the entries, and the entries take its bytes."""
    ids = prompt(60, seed=4)
    with evict(tiny(family)) as cache:
        force(tiny(family), cache, ids, 11)
        kept = cache.kept_positions()
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = FAMILIES[family]().to(dtype).eval()
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        with evict(model) as cache:
            frames = force(model, cache, ids, 11)
            assert all(bool(f.logits.isfinite().all()) for f in frames)
            assert torch.equal(cache.kept_positions(), kept)
            assert {layer.k.dtype for layer in cache.evicting} == {dtype}
            heads = model.config.num_key_value_heads
            bytes_ = sum(t.nbytes for layer in cache.evicting for t in (layer.k, layer.v))
            assert bytes_ == 2 * 2 * len(evicting_layers(model)) * heads * (K + R) * cache.evicting[0].k.shape[-1]


def test_keep_and_forget_masks() -> None:
    """By (row, layer, head, position): kept entries survive everything, forgotten ones go first."""
    model, ids, rows, layers, heads = tiny("llama"), prompt(70, seed=4).expand(2, -1), 2, 3, 2
    keep = torch.zeros(rows, layers, heads, 40, dtype=torch.bool)
    forget = torch.zeros(rows, layers, heads, 70, dtype=torch.bool)
    keep[0, 1, 0, [13, 17]] = True  # one head of one row
    keep[1, :, :, 12] = True
    forget[0, 2, 1, 11:24] = True
    forget[1, 0, 0, 12] = True  # keep outranks forget
    forget[1, 2, 1, 30:33] = True
    with evict(model, keep=keep, forget=forget) as cache, taped(model, cache) as frames:
        step(model, cache, ids[:, :11])
        for t in range(11, 70):
            step(model, cache, ids[:, t : t + 1])
    for i in range(2):
        assert check_row(model, frames, ids[:1], Rule(K, R, R, share=1), 11, i) >= 10
    last = [frame.kept[0] for frame in frames][-1], [frame.kept[1] for frame in frames][-1]
    assert {13, 17} <= set(last[0][1, 0].tolist())
    assert not {13, 17} <= set(last[0][1, 1].tolist())
    assert all(12 in last[1][layer, head] for layer in range(layers) for head in range(heads))
    after = {round_: frames[1 + (K + R - 11) + R * (round_ - 1)].kept for round_ in range(1, 6)}
    assert not set(range(11, 24)) & set(after[4][0][2, 1].tolist())  # 13 forgotten entries are gone after 4 rounds
    assert set(range(11, 24)) & set(after[4][0][2, 0].tolist())
    plain = evict(model)
    with plain as other:
        force(model, other, ids, 11)
        assert torch.equal(other.kept_positions(0)[0], last[0][0])  # an untouched layer draws as before
    one = torch.zeros(1, 1, 1, 20, dtype=torch.bool)
    one[..., 15] = True
    with evict(model, keep=one) as cache:
        force(model, cache, ids, 11)
        assert all(bool((cache.kept_positions(i) == 15).any(-1).all()) for i in range(2))
