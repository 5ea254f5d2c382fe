"""The tap: it sees the queries of its own cache's forwards and leaves no trace on the model."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.llama.modeling_llama import LlamaAttention

import kvkeep
from kvkeep.hf.model import Unsupported
from kvkeep.policies import Policy
from kvkeep.signals import KEYS, RoundView
from masked import force
from models import CACHE, generate, left_pad, prompt, step, tiny
from small import K, R, evict
from test_hf_forwards import hooks

SNAPKV = kvkeep.Settings.of("snapkv", budget=K, buffer=R)


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """After every test the model is as it was."""
    model = tiny("llama")
    gc.collect()
    yield
    gc.collect()
    assert untapped(model)
    assert hooks(model) == 0


def untapped(model: Any) -> bool:
    configs = [layer.self_attn.config for layer in model.model.layers]
    return all(config is model.config for config in configs) and model.config._attn_implementation == "sdpa"


@contextmanager
def calls(module: nn.Module, what: Any, after: bool = False) -> Iterator[None]:
    register = module.register_forward_hook if after else module.register_forward_pre_hook
    handle = register(lambda *args: what())
    try:
        yield
    finally:
        handle.remove()


def positions(model: Any, ids: Tensor, cache: Any, first: int = 11) -> Tensor:
    force(model, cache, ids, first)
    return cache.kept_positions()


# ---- nothing changes ----------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("gemma3", "sdpa"),
                                                   ("gpt-oss", "eager"), ("phi3", "sdpa")])  # fmt: skip
def test_outputs_are_those_without_the_tap(family: str, attention: str) -> None:
    """Bit for bit, padded or not, until the first round."""
    model = tiny(family, attention)
    for lengths in ([11], [11, 5]):
        batch, found = left_pad([prompt(n) for n in lengths]), []
        for policy in ("snapkv", "recency"):
            with evict(model, policy) as cache:
                ids, mask = batch["input_ids"], batch["attention_mask"]
                found.append(generate(model, cache, ids, K + R - 11, attention_mask=mask))
                assert cache.stats()["rounds"] == [0] * len(lengths)
                assert model.config._attn_implementation == attention
        assert torch.equal(found[0].sequences, found[1].sequences)
        assert torch.equal(torch.stack(found[0].logits), torch.stack(found[1].logits))


def test_the_configuration_is_never_touched() -> None:
    """Neither between forwards nor within one, where other threads make their masks by it."""
    model, ids, seen = tiny("llama"), prompt(40, seed=4), list[str]()
    module = model.model.layers[1].self_attn.q_proj

    def look() -> None:
        seen.append(model.config._attn_implementation)

    with evict(model, "snapkv") as cache, calls(module, look):
        force(model, cache, ids, 11)
        assert model.model.layers[1].self_attn.config._attn_implementation == "sdpa"
        twin = copy.deepcopy(model)
        assert twin.model.layers[1].self_attn.config is twin.config
        assert model.model.layers[1].self_attn.config.hidden_size == 32
    assert seen == ["sdpa"] * 30
    assert untapped(model)


def test_the_implementation_may_change_while_a_cache_lives() -> None:
    model, ids = copy.deepcopy(tiny("llama")), prompt(60, seed=4)
    with evict(model, "snapkv") as cache:
        expected = positions(model, ids, cache)
        cache.reset()
        model.set_attn_implementation("eager")
        assert model.model.layers[0].self_attn.config._attn_implementation == "eager"
        assert torch.equal(positions(model, ids, cache), expected)


def test_a_function_that_asks_the_configuration_for_its_name() -> None:
    """transformers' flash function hands ``module.config._attn_implementation`` on to whoever loads kernels."""
    names = list[str]()

    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        names.append(module.config._attn_implementation)
        return AttentionInterface()["sdpa"](module, *args, **kwargs)

    AttentionInterface.register("kvkeep_asking", attend)
    AttentionMaskInterface.register("kvkeep_asking", sdpa_mask)
    model, ids = copy.deepcopy(tiny("llama")), prompt(60, seed=4)
    with evict(model, "snapkv") as cache:
        expected = positions(model, ids, cache)
        cache.reset()
        model.config._attn_implementation = "kvkeep_asking"
        assert torch.equal(positions(model, ids, cache), expected)
    assert set(names) == {"kvkeep_asking"}


# ---- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["q_proj", "o_proj", ""])
def test_a_forward_that_fails(where: str, error: type[BaseException]) -> None:
    """Before, behind or at the tap: nobody is left waiting, and the cache goes on after reset()."""
    model, ids = tiny("llama"), prompt(60, seed=4)
    with evict(model, "snapkv") as cache:
        expected = positions(model, ids, cache)
        with torch.no_grad():
            clean = model(ids).logits

        def fail() -> None:
            raise error

        attention = model.model.layers[1].self_attn
        cache.reset()
        force(model, cache, ids[:, :20], 11)
        with calls(attention.get_submodule(where), fail, after=not where), pytest.raises(error):
            step(model, cache, ids[:, 20:21])
        assert model.config._attn_implementation == "sdpa"
        ring = {layer: data.clone() for layer, data in cache.watch.ring._data.items()}
        batch = left_pad([ids, ids[:, :30]])
        with torch.no_grad():
            assert torch.equal(model(ids).logits, clean)
            padded = model(**batch).logits
        assert torch.allclose(padded[1, -30:], model(ids[:, :30]).logits[0], atol=1e-5), "the mask got lost"
        assert all(torch.equal(ring[layer], data) for layer, data in cache.watch.ring._data.items())
        with pytest.raises(RuntimeError, match=r"call reset\(\)"):
            step(model, cache, ids[:, 20:21])
        cache.reset()
        assert torch.equal(positions(model, ids, cache), expected)


class OwnAttention(LlamaAttention):
    """Does not look up any attention function."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.k_proj, self.v_proj))
        kwargs[CACHE].update(k, v, self.layer_idx)
        return self.o_proj(self.q_proj(hidden_states)), None


class Child(LlamaAttention):
    """A subclass in a file that has no eager function of its own."""


def with_attention(kind: type[LlamaAttention], implementation: str = "sdpa") -> LlamaForCausalLM:
    model = copy.deepcopy(tiny("llama"))
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    model.set_attn_implementation(implementation)
    return model


def test_attention_that_cannot_be_tapped_is_refused() -> None:
    """Before any token comes out, with what to do instead; other policies work."""
    model = with_attention(OwnAttention)
    with (
        evict(model, "snapkv") as cache,
        pytest.raises(Unsupported, match="OwnAttention computes attention in"),
    ):
        step(model, cache, prompt(11))
    with evict(model, "knorm") as cache:
        step(model, cache, prompt(11))


def test_eager_attention_of_a_subclass() -> None:
    ids = prompt(60, seed=4)
    with evict(tiny("llama", "eager"), "snapkv") as cache:
        expected = positions(tiny("llama", "eager"), ids, cache)
    model = with_attention(Child, "eager")
    with evict(model, "snapkv") as cache:
        assert torch.equal(positions(model, ids, cache), expected)


# ---- several users of one model -----------------------------------------------------------------


def test_only_its_own_forwards_are_tapped() -> None:
    """Two caches in turn, a cache without queries and plain forwards between: each as if alone."""
    model, ids = tiny("llama"), prompt(60, seed=4)
    others = {"snapkv": prompt(60, seed=5), "recency": prompt(60, seed=6)}
    alone = {}
    for name, tokens in (("first", ids), *others.items()):
        with evict(model, "recency" if name == "recency" else "snapkv") as cache:
            alone[name] = positions(model, tokens, cache)
    first = SNAPKV.cache(model)
    with evict(model, "snapkv") as second, evict(model, "recency") as third, torch.no_grad():
        for t in range(11, 61):
            a, b = (0 if t == 11 else t - 1), t
            for cache, tokens in ((first, ids), (second, others["snapkv"]), (third, others["recency"])):
                step(model, cache, tokens[:, a:b])
                before = [data.clone() for c in (first, second) if c.watch.ring for data in ring(c)]
                model(prompt(5))
                generate(model, None, prompt(5), 1)
                after = [data for c in (first, second) if c.watch.ring for data in ring(c)]
                assert all(map(torch.equal, before, after))
            if t == 30:  # one of them ends: the other's tap stays open
                assert not untapped(model)
        assert torch.equal(second.kept_positions(), alone["snapkv"])
        assert torch.equal(third.kept_positions(), alone["recency"])
        kept = first.kept_positions()
    assert torch.equal(kept, alone["first"])
    assert not untapped(model), "the first cache is still open"
    first.reset()
    assert torch.equal(positions(model, ids, first), alone["first"])
    first.close()
    assert untapped(model)


def ring(cache: Any) -> list[Tensor]:
    return list(cache.watch.ring._data.values())


def test_threads() -> None:
    """Three threads in lockstep on one model: two taps, and plain padded forwards that make their masks meanwhile."""
    model, tokens = tiny("llama"), [prompt(50, seed=4), prompt(50, seed=5)]
    alone = []
    for ids in tokens:
        with evict(model, "snapkv") as cache:
            alone.append(positions(model, ids, cache))
    batch = left_pad([prompt(9), prompt(4)])
    with torch.no_grad():
        clean = model(**batch).logits
    barrier, found, errors = threading.Barrier(3, timeout=30), dict[int, Any](), list[BaseException]()

    def work(i: int) -> None:
        try:
            if i == 2:
                with torch.no_grad():
                    found[i] = [model(**batch).logits for _ in range(40)]
            else:
                with evict(model, "snapkv") as cache:
                    found[i] = positions(model, tokens[i], cache)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    def meet() -> None:
        barrier.wait()

    # Within attention, between its hook and the tap; and before the masks are made.
    with calls(model.model.layers[1].self_attn.q_proj, meet), calls(model.model.embed_tokens, meet):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert all(torch.equal(found[i], alone[i]) for i in range(2))
    assert all(torch.equal(logits, clean) for logits in found[2])


@pytest.mark.parametrize("how", ["close", "drop", "collect"])
def test_a_cache_that_ends_takes_its_tap_along(how: str) -> None:
    model = tiny("llama")
    cache: Any = SNAPKV.cache(model)
    step(model, cache, prompt(11))
    gone = weakref.ref(ring(cache)[0])
    assert not untapped(model)
    if how == "close":
        cache.close()
        cache.close()
        assert untapped(model)
        return
    if how == "collect":
        cache.friends = [cache]
    del cache
    gc.collect()
    assert gone() is None
    assert untapped(model)


def test_reset_forgets_the_queries() -> None:
    """The second request votes with its own queries, also where it is shorter than the ring."""
    model, ids, short = tiny("llama"), prompt(60, seed=4), prompt(60, seed=5)
    with evict(model, "snapkv", queries=20) as cache:
        expected = positions(model, short, cache, 2)
    with evict(model, "snapkv", queries=20) as cache:
        positions(model, ids, cache)
        cache.reset()
        assert torch.equal(positions(model, short, cache, 2), expected)


def test_inference_mode() -> None:
    """A cache may be used inside and outside of it in turn."""
    model, ids = tiny("llama"), prompt(60, seed=4)
    with evict(model, "snapkv") as cache:
        expected = positions(model, ids, cache)
        cache.reset()
        for t in range(11, 61):
            with torch.inference_mode(t % 3 == 0):
                step(model, cache, ids[:, (0 if t == 11 else t - 1) : t])
        assert torch.equal(cache.kept_positions(), expected)


# ---- policies of others -------------------------------------------------------------------------


@dataclass(frozen=True)
class KeysAlone(Policy):
    """Knorm, but it names keys and not positions."""

    name: ClassVar[str] = "keys-alone"
    signals: ClassVar[frozenset[str]] = frozenset({KEYS})

    def score(self, view: RoundView) -> Tensor:
        return view.by_layer(lambda layer: layer.candidates(layer.ascending(-layer.keys.float().norm(dim=-1))))


def test_a_policy_that_names_keys_alone() -> None:
    """Its scores come by position, so its candidates must."""
    model, ids = tiny("llama"), prompt(60, seed=4)
    with evict(model, "knorm") as cache:
        expected = positions(model, ids, cache)
    with evict(model, KeysAlone()) as cache:
        assert torch.equal(positions(model, ids, cache), expected)
