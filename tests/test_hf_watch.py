"""What the engine collects for a policy: exact, bounded, and nothing that nobody asked for."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import kvkeep
from formulas.infokv import infokv
from kvkeep.hf import information
from kvkeep.hf import received as received_module
from kvkeep.hf.digests import Digests
from kvkeep.hf.received import received
from kvkeep.policies import make_policy, policies
from kvkeep.rotary import Rotary
from masked import Rule, close, force
from models import CACHE, generate, left_pad, prompt, step, tiny
from observed import observe
from scored import Count
from small import K, R, evict

ROTARY = Rotary(torch.tensor([1.0, 0.3, 0.1, 0.01], dtype=torch.float64), 1.2)


# ---- attention received -------------------------------------------------------------------------


def _attention(rows: int = 2, q: int = 5, slots: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(rows, 4, q, 8, generator=made), torch.randn(rows, 2, slots, 8, generator=made)
    causal = torch.arange(slots) <= torch.arange(q)[:, None] + slots - q
    scores = queries.double() @ keys.double().repeat_interleave(2, 1).transpose(-1, -2) * 0.3
    weights = scores.masked_fill(~causal, float("-inf")).softmax(-1)
    return queries, keys, weights


@pytest.mark.parametrize("numbers", [1 << 24, 1, 200])
@pytest.mark.parametrize("kind", ["none", "bool", "additive", "flash"])
def test_received_is_the_sum_of_weights(kind: str, numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few queries are taken at once, and whatever form the mask has; padding queries do not count."""
    monkeypatch.setattr(received_module, "_NUMBERS", numbers)
    queries, keys, weights = _attention()
    causal = torch.arange(9) <= torch.arange(5)[:, None] + 4
    mask = {
        "none": None,
        "bool": causal.expand(2, 1, 5, 9),
        "additive": torch.zeros(2, 1, 5, 9).masked_fill(~causal, torch.finfo(torch.float32).min),
        "flash": torch.ones(2, 9, dtype=torch.int64),
    }[kind]
    found = received(queries, keys, mask, 0.3, [0, 2])
    weights[1, :, :2] = 0
    expected = weights.view(2, 2, 2, 5, 9).sum((2, 3))
    close(found, expected.float(), 1e-5)


def test_received_with_padding_in_flash_form() -> None:
    queries, keys, _ = _attention(1)
    mask = torch.ones(1, 9, dtype=torch.int64)
    mask[:, :2] = 0
    found = received(queries, keys, mask, 0.3, [0])
    assert (found[..., :2] == 0).all()
    close(found.sum(-1), torch.full((1, 2), 10.0), 1e-5)


def test_no_matrix_of_all_queries_and_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 400 tokens: no tensor of 400 x 400 weights is made."""
    monkeypatch.setattr(received_module, "_NUMBERS", 4 * 400 * 8)
    sizes: list[int] = []
    softmax = Tensor.softmax

    def noted(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sizes.append(self.shape[-2])
        return softmax(self, *args, **kwargs)

    monkeypatch.setattr(Tensor, "softmax", noted)
    with kvkeep.evict(tiny("llama"), "h2o", budget=500, buffer=8) as cache:
        step(tiny("llama"), cache, prompt(400))
    assert max(sizes) == 8


# ---- digests --------------------------------------------------------------------------------------


class Blocks:
    """A policy whose digest is the list of what it was given: first position, length and sum of each block."""

    digest_blocks = (8, 3)

    def digest(self, state: Tensor | None, queries: Tensor, positions: Tensor) -> Tensor:
        new = torch.stack([positions[:, 0].float(), torch.full((len(positions),), positions.shape[1] * 1.0),
                           queries.sum((1, 2, 3))], dim=-1)  # fmt: skip
        old = torch.zeros(len(new), 40, 3) if state is None else state.clone()
        old[:, int(old[0, -1, 0])] = new
        old[:, -1, 0] += 1
        return old


@pytest.mark.parametrize("pieces", [[21], [8, 8, 5], [1] * 21, [3, 15, 3]])
def test_digest_blocks_do_not_depend_on_chunks(pieces: list[int]) -> None:
    """Prompt blocks at multiples of 8, the last shorter; trace blocks of 3 from the first trace token."""
    made = torch.Generator().manual_seed(1)
    pre = torch.randn(1, 2, 31, 8, generator=made)
    queries = ROTARY.rotate(pre, torch.arange(31)[None, None])
    digests: Any = Digests(Blocks(), ROTARY, 1)  # type: ignore[arg-type]
    at = 0
    for size in pieces:
        digests.add_prompt(0, queries[:, :, at : at + size], [0])
        at += size
    for t in range(21, 31, 2):
        digests.add_trace(0, queries[:, :, t : t + 2], torch.arange(t, t + 2)[None])
    state = digests.get(0, [0])[0]
    edges = [(0, 8), (8, 16), (16, 21), (21, 24), (24, 27), (27, 30)]
    assert state[:6, :2].tolist() == [[float(a), float(b - a)] for a, b in edges]
    close(state[:6, 2], torch.stack([pre[0, :, a:b].sum() for a, b in edges]), 1e-4)
    assert digests.pending(0) == 1
    assert digests.nbytes >= 40 * 3 * 4


# ---- entropy --------------------------------------------------------------------------------------


def test_logits_of_a_prompt_exist_a_few_positions_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` asks for the last position's logits only; the others' are made 16 at a time here, 256 as it is."""
    monkeypatch.setattr(information, "_POSITIONS", 16)
    model, widths = tiny("llama"), []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: widths.append(output.shape[1]))
    with kvkeep.evict(model, "infokv", budget=150, buffer=8) as cache:
        generate(model, cache, prompt(100), 12)
    handle.remove()
    assert max(widths) == 16
    assert sum(widths) == 100 + 1 + 11, "the prompt, its last position for generate, and each decoding step once"


def test_a_forward_without_the_output_layer_is_caught_up() -> None:
    """The decoder alone, as multi-chunk prefills call it: entropies are those of whole forwards."""
    model, ids = tiny("llama"), prompt(30)
    with kvkeep.evict(model, "infokv", budget=K, buffer=R, prompt_length=12) as cache:
        step(model, cache, ids[:, :12])
        for t in range(12, 30):
            step(model, cache, ids[:, t : t + 1])
        whole = cache.kept_positions()
    with kvkeep.evict(model, "infokv", budget=K, buffer=R, prompt_length=12) as cache, torch.no_grad():
        model.model(ids[:, :12], use_cache=True, **{CACHE: cache})
        model(prompt(12, seed=5))  # other logits of the same shape in between
        for t in range(12, 30):
            model.model(ids[:, t : t + 1], use_cache=True, **{CACHE: cache})
        assert torch.equal(cache.kept_positions(), whole)


# ---- nothing that nobody asked for ------------------------------------------------------------------


def test_random_costs_nothing() -> None:
    """No tap, no hook on blocks or the output layer, no number beside an entry."""
    model = tiny("llama")
    plain = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    with evict(model, "random") as cache:
        force(model, cache, prompt(60), 11)
        assert cache.watch.ring is cache.watch.digests is cache.watch.predictions is None
        assert all(layer.beside is None for layer in cache.evicting)
        assert not model.lm_head._forward_hooks
        assert not any(block._forward_hooks for block in model.model.layers)
        assert cache.watch.nbytes == 0
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == plain


@pytest.mark.parametrize("name", [name for name, p in policies().items() if p.evicts])
def test_hooks_go_and_bytes_are_counted(name: str) -> None:
    """Every policy: state counted is the state that is there, hooks are off the model afterwards, reset forgets."""
    model, ids = tiny("llama"), prompt(60, seed=4)
    before = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    with kvkeep.evict(model, make_policy(name), budget=40, buffer=R) as cache:
        force(model, cache, ids, 11)
        watch = cache.watch
        held = [t for layer in cache.evicting if (t := layer.beside) is not None]
        if watch.ring is not None:
            held += list(watch.ring._data.values())
        if watch.digests is not None:
            held += list(watch.digests._state.values())
            held += [t for parts in watch.digests._tail.values() for part in parts for t in part]
        if watch.predictions is not None and watch.predictions.before is not None:
            held.append(watch.predictions.before)
        moves = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
                 for m in cache._rounds._ahead.values() for t in (m.src, m.dst)}  # fmt: skip
        found = cache.stats()["bytes"]
        assert found["policy"] == sum(t.untyped_storage().nbytes() for t in held) + sum(moves.values())
        first = cache.kept_positions()
        cache.reset()
        assert cache.stats()["bytes"]["policy"] == 0
        force(model, cache, ids, 11)
        assert torch.equal(cache.kept_positions(), first), "nothing is left of the request before"
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == before


@pytest.mark.parametrize("name", ["h2o", "infokv", "expected", "beaconkv", "triattention"])
def test_prompts_in_chunks_through_generate(name: str) -> None:
    """A padded batch whose short row has nothing but padding in the first chunks."""
    model = tiny("llama")
    inputs = left_pad([prompt(30, seed=1), prompt(4, seed=2)])
    kept = []
    for chunk in (None, 7):
        with kvkeep.evict(model, name, budget=40, buffer=R) as cache:
            out = model.generate(**inputs, **{CACHE: cache}, max_new_tokens=30, do_sample=False, use_cache=True,
                                 prefill_chunk_size=chunk)  # fmt: skip
            kept.append((out, [cache.kept_positions(row) for row in range(2)]))
    assert torch.equal(kept[0][0], kept[1][0])
    assert all(torch.equal(a, b) for a, b in zip(kept[0][1], kept[1][1], strict=True))


# ---- what a review found ------------------------------------------------------------------------------


def test_rows_are_selected_with_their_pending_entropy() -> None:
    """After the decoder alone (as `prefill` runs it) entropy is outstanding: it belongs to the rows as they were."""
    model, ids, kept = tiny("llama"), torch.cat([prompt(12, seed=1), prompt(12, seed=2)]), []
    for settled in (True, False):
        for change in ("select", "repeat"):
            with kvkeep.evict(model, "infokv", budget=K, buffer=R, prompt_length=12, alpha=0.2) as cache:
                with torch.no_grad():
                    model.model(ids, use_cache=True, **{CACHE: cache})
                if settled:
                    cache.watch.settle()
                if change == "select":
                    cache.batch_select_indices(torch.tensor([1, 0]))
                else:
                    cache.batch_repeat_interleave(2)
                for t in range(40):
                    step(model, cache, prompt(40, seed=4)[:, t : t + 1].expand(len(cache.rows), -1))
                kept.append([cache.kept_positions(row) for row in range(len(cache.rows))])
    for settled, pending in zip(kept[:2], kept[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(settled, pending, strict=True))
    assert not torch.equal(kept[0][0], kept[0][1])


def test_another_thread_may_go_on() -> None:
    """`prefill` here, `generate` in a thread, as streamers do it."""
    model, ids, kept = tiny("llama"), prompt(40), []
    for threaded in (False, True):
        cache = kvkeep.Settings("infokv", prefill_keep=0.5, window=4, options={"alpha": 0.0}).cache(model)
        cache.prefill(ids[:, :30])
        if threaded:
            thread = threading.Thread(target=generate, args=(model, cache, ids, 5))
            thread.start()
            thread.join()
        else:
            generate(model, cache, ids, 5)
        kept.append(cache.kept_positions())
        cache.close()
    assert torch.equal(kept[0], kept[1])


@pytest.mark.parametrize("values", [{"policy": "h2o"}, {"policy": "infokv", "final_norm": True},
                                    {"policy": "expected"}, {"policy": "beaconkv"}])  # fmt: skip
def test_no_graph_grows_in_grad_mode(values: dict[str, Any]) -> None:
    model, ids = tiny("llama"), prompt(40)
    with torch.enable_grad(), kvkeep.evict(model, **values, budget=K, buffer=R) as cache:
        for first, end in [(0, 11), *((t, t + 1) for t in range(11, 40))]:
            model(ids[:, first:end], use_cache=True, **{CACHE: cache})
        held = [layer.beside for layer in cache.evicting if layer.beside is not None]
        if cache.watch.digests is not None:
            held += list(cache.watch.digests._state.values())
        assert held
        assert not any(t.requires_grad for t in held)


def test_logits_that_a_model_changes_afterwards_are_refused() -> None:
    """Their entropy would be wrong, silently."""
    model = tiny("llama")

    def scaled(module: Any, args: Any, output: Any) -> Any:
        output.logits = output.logits * 0.5
        return output

    handle = model.register_forward_hook(scaled)
    try:
        said = "changes its logits after the output layer"
        with evict(model, "infokv") as cache, pytest.raises(ValueError, match=said):
            step(model, cache, prompt(11))
    finally:
        handle.remove()


@pytest.mark.parametrize("options", [{"final_norm": True}, {"shift": 0}, {"renormalise": True, "top": 5}])
def test_infokv_on_a_model_as_its_options_say(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(62, seed=4)
    with evict(tiny("qwen3"), "infokv", alpha=0.3, **options) as cache:
        frames = force(tiny("qwen3"), cache, ids, 11)
    told = {"final_norm": options.get("final_norm", False), "shift": options.get("shift", 1),
            "top": options.get("top", 256), "renormalise": options.get("renormalise", False)}  # fmt: skip
    count = Count()
    for seen in observe(monkeypatch, "qwen3", frames, ids, Rule(K, R, R, share=1), 11, R, **told):
        scores = infokv(seen.row, alpha=0.3)
        for i, layer in enumerate(seen.row):
            for h, entries in enumerate(layer):
                count.compare(seen.gone[i][h], scores[i][h], entries.candidates)
    assert count.rounds >= 54
    assert count.near <= count.rounds // 20
