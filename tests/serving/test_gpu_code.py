"""The GPU backends without a GPU: vLLM's own metadata builders and implementations, with kernels in plain torch.

What only a GPU can show (the kernels, captured graphs, speed) is not tested here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engines import checkpoint
from torch import Tensor

from kvkeep.draws import rank_keys, round_words
from kvkeep.vllm import KEY, Refused
from kvkeep.vllm.requests import Tracked

pytestmark = pytest.mark.vllm

LAYERS, HEADS, GROUP, DIM, BLOCK, WIDTH = 2, 2, 2, 32, 16, 20
NAMES = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
CPU = torch.device("cpu")
PER_HEAD = {"policy": "random", "budget": 40, "buffer": 8, "seed": 5}
WHOLE_BLOCKS = {"policy": "random", "draw": "model", "unit": 16, "budget": 64, "buffer": 16, "seed": 5}


# ---- vLLM's pieces, on the CPU ---------------------------------------------------------------------------------------


def _config(keep: dict[str, Any] | None) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    extra = {} if keep is None else {KEY: keep}
    config = EngineArgs(
        checkpoint("qwen3"), dtype="float32", max_model_len=WIDTH * BLOCK, block_size=32, skip_tokenizer_init=True,
        additional_config=extra, max_num_seqs=8, max_num_batched_tokens=WIDTH * BLOCK,
    ).create_engine_config()  # fmt: skip
    config.cache_config.block_size = BLOCK  # GPUs take 16
    layer = {"_q_scale": torch.ones(()), "_k_scale": torch.ones(()), "_v_scale": torch.ones(())}
    context = config.compilation_config.static_forward_context
    context.update({name: SimpleNamespace(layer_name=name, **layer) for name in NAMES})
    return config


def _paged_attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, **how: Any) -> None:
    """Attention over paged rows [NB, BS, H, D], causal from the end, row by row."""
    starts = how["cu_seqlens_q"].tolist()
    for row, (begin, end) in enumerate(itertools.pairwise(starts)):
        length = int(how["seqused_k"][row])
        if begin == end:
            continue
        assert length <= how["max_seqlen_k"]
        assert end - begin <= how["max_seqlen_q"]
        blocks = how["block_table"][row, : -(-length // BLOCK)].long()
        keys, values = (x[blocks].flatten(0, 1)[:length].repeat_interleave(GROUP, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[begin:end], keys) * how["softmax_scale"]
        seen = torch.arange(length) <= torch.arange(length - (end - begin), length)[:, None]
        out[begin:end] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)


def _write(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, *_: Any) -> None:
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            keys[slot // BLOCK, slot % BLOCK], values[slot // BLOCK, slot % BLOCK] = key[i], value[i]


@pytest.fixture(params=["flash", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One of the GPU backends, whose kernels are the ones above."""
    from vllm.v1.attention.backends import flash_attn, triton_attn

    import kvkeep.vllm.keeper as keeper
    from kvkeep.vllm.flash import KeepFlashBackend
    from kvkeep.vllm.triton import KeepTritonBackend

    monkeypatch.setattr(keeper, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(keeper, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(flash_attn, "_FA4_DENSE_ATTENTION_KERNEL", _paged_attention)
    monkeypatch.setattr(flash_attn, "reshape_and_cache_flash", _write, raising=False)
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda **_: 2)
    monkeypatch.setattr(triton_attn, "unified_attention", _paged_attention)
    monkeypatch.setattr(triton_attn, "triton_reshape_and_cache_flash", _write)
    return KeepFlashBackend if request.param == "flash" else KeepTritonBackend


@dataclass
class Fed:
    """A request: what it is to kvkeep, its keys and values by position, and what the reference holds."""

    tracked: Tracked
    blocks: list[int]
    cached: int = 0
    keys: list[Tensor] = field(default_factory=list)  # [LAYERS, HEADS, DIM] each
    values: list[Tensor] = field(default_factory=list)
    held: list[list[list[int]]] = field(default_factory=lambda: [[[] for _ in range(HEADS)] for _ in range(LAYERS)])

    def append(self, policy: Any, key: Tensor, value: Tensor) -> None:
        """The reference: each head's slots as a list of positions."""
        timeline, position = self.tracked.timeline, len(self.keys)
        self.keys.append(key)
        self.values.append(value)
        for layer in range(LAYERS):
            for head in range(HEADS):
                slots = self.held[layer][head]
                if len(slots) == timeline.kept + timeline.every:
                    self._round(slots, policy, layer, head, (position - timeline.first) // timeline.every)
                slots.append(position)

    def _round(self, slots: list[int], policy: Any, layer: int, head: int, number: int) -> None:
        timeline, unit = self.tracked.timeline, policy.unit
        if policy.draw == "model":
            layer = head = 0
        start = -(-timeline.shared // unit) * unit
        words = round_words(5, *(torch.tensor([x]) for x in (self.tracked.stream, layer, head, number)))
        keys = rank_keys(words, torch.arange((timeline.kept - start) // unit, dtype=torch.int32)).flatten()
        victims = keys.argsort()[: timeline.every // unit].sort().values.tolist()
        newest = slots[timeline.kept :]
        del slots[timeline.kept :]
        for i, victim in enumerate(victims):
            at = start + victim * unit
            slots[at : at + unit] = newest[i * unit : (i + 1) * unit]

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """What a query of the newest token, [HEADS * GROUP, DIM], should get."""
        found = []
        for head in range(HEADS):
            keys = torch.stack([self.keys[p][layer, head] for p in self.held[layer][head]])
            values = torch.stack([self.values[p][layer, head] for p in self.held[layer][head]])
            mine = query[head * GROUP : (head + 1) * GROUP]
            found.append((mine @ keys.T * DIM**-0.5).softmax(-1) @ values)
        return torch.cat(found)


class Runner:
    """A worker's steps over a small pool of blocks, as vLLM's model runner describes them."""

    def __init__(self, backend: Any, keep: dict[str, Any]) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        from kvkeep.vllm.spec import KeepSpec
        from kvkeep.vllm.tap import RequestTap

        self.config = _config(keep)
        self.tap = RequestTap(self.config, CPU, False)
        assert self.tap.serving is not None
        self.serving = self.tap.serving
        with set_current_vllm_config(self.config):
            assert backend.get_impl_cls() is backend.impl
            full = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32)
            spec = backend.customize_spec(full)
            assert type(spec) is KeepSpec
            self.builder = backend.get_builder_cls()(spec, NAMES, self.config, CPU)
            self.impls = [backend.impl(HEADS * GROUP, DIM, DIM**-0.5, HEADS, None, None, "auto") for _ in range(LAYERS)]
        context = self.config.compilation_config.static_forward_context
        self.layers = [context[name] for name in NAMES]
        # As FlashAttention's cache lies in memory: blocks, entries, heads.
        for layer in self.layers:
            layer.kv_cache = torch.full((80, BLOCK, HEADS, 2 * DIM), torch.nan).transpose(1, 2)
        self.table, self.lengths = torch.zeros(8, WIDTH, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
        self.starts = torch.zeros(9, dtype=torch.int32)
        self.free, self.random = list(range(79, 0, -1)), torch.Generator().manual_seed(1)

    def request(self, prompt: int, sample: int = 0) -> Fed:
        tracked = Tracked(self.serving, list(range(7, 7 + prompt)), sample)
        return Fed(tracked, [self.free.pop() for _ in range(-(-tracked.timeline.slots // BLOCK))])

    def common(self, rows: Sequence[tuple[Fed, int]], padded: int = 0) -> Any:
        """A step in which each request feeds so many tokens, padded to ``padded`` rows (and tokens)."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        self.tap.rows = [request.tracked for request, _ in rows]
        counts, total = [n for _, n in rows], sum(n for _, n in rows)
        many, tokens = max(padded, len(rows)), max(padded, total)
        self.starts[: many + 1] = torch.tensor([*np.cumsum([0, *counts]), *[total] * (many - len(rows))])
        self.lengths.zero_()
        self.table[len(rows) :].zero_()
        for row, (request, n) in enumerate(rows):
            self.lengths[row] = request.cached + n
            self.table[row, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=self.starts[: many + 1], query_start_loc_cpu=self.starts[: many + 1].clone(),
            seq_lens=self.lengths[:many], seq_lens_cpu_upper_bound=self.lengths[:many].clone(), num_reqs=many,
            num_actual_tokens=tokens, max_query_len=max(counts), max_seq_len=int(self.lengths.max()),
            block_table_tensor=self.table[:many], slot_mapping=torch.full((tokens,), -7),
        )  # fmt: skip

    def step(self, rows: Sequence[tuple[Fed, int]], padded: int = 0) -> Any:
        """Run it and compare every token's output in every layer; the metadata."""
        common = self.common(rows, padded)
        meta = self.builder.build(0, common)
        tokens = common.num_actual_tokens
        q, k, v = (
            torch.randn(LAYERS, tokens, heads, DIM, generator=self.random) for heads in (HEADS * GROUP, HEADS, HEADS)
        )
        expected, real = torch.empty_like(q), sum(n for _, n in rows)
        at = 0
        for request, n in rows:
            for i in range(at, at + n):
                request.append(self.serving.policy, k[:, i], v[:, i])
                for layer in range(LAYERS):
                    expected[layer, i] = request.attend(layer, q[layer, i])
            request.cached, at = request.cached + n, at + n
        for layer, (impl, module) in enumerate(zip(self.impls, self.layers, strict=True)):
            out = torch.zeros(tokens, HEADS * GROUP, DIM)
            impl.do_kv_cache_update(module, k[layer], v[layer], module.kv_cache, common.slot_mapping)
            impl.forward(module, q[layer], k[layer], v[layer], module.kv_cache, meta, out)
            torch.testing.assert_close(out[:real], expected[layer, :real], rtol=1e-5, atol=1e-5)
        return meta


# ---- what is computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [PER_HEAD, WHOLE_BLOCKS], ids=["per_head", "whole_blocks"])
def test_padded_decoding_at_fixed_addresses(backend: Any, keep: dict[str, Any]) -> None:
    """Requests of different lengths, decoded in padded batches over many rounds, as a captured graph would see them."""
    runner = Runner(backend, keep)
    requests = [runner.request(prompt, sample) for sample, prompt in enumerate((10, 21, 10))]
    runner.step([(r, r.tracked.timeline.prompt) for r in requests])
    addresses = set()
    for _ in range(110):
        meta = runner.step([(r, 1) for r in requests], padded=4)
        (part,) = meta.parts
        addresses.add(
            (part.meta.seq_lens.data_ptr(), part.meta.slot_mapping.data_ptr(), part.meta.block_table.data_ptr())
        )
        assert part.meta.seq_lens[3] == 0
        assert part.meta.slot_mapping[3] == -1
        assert not part.meta.block_table[3].any()
        assert part.meta.max_seq_len <= runner.serving.slots
        assert not part.moves  # a graph could not run them
    captured = runner.builder.build_for_cudagraph_capture(runner.common([(r, 1) for r in requests], padded=4))
    meta = captured.parts[0].meta
    addresses.add((meta.seq_lens.data_ptr(), meta.slot_mapping.data_ptr(), meta.block_table.data_ptr()))
    assert len(addresses) == 1
    assert runner.lengths[0] == 10 + 110 + 1  # vLLM's own lengths are left alone


@pytest.mark.parametrize("keep", [PER_HEAD, WHOLE_BLOCKS], ids=["per_head", "whole_blocks"])
def test_chunks_and_resumed_requests(backend: Any, keep: dict[str, Any]) -> None:
    """A request that was preempted feeds its whole trace at once, in pieces that cut rounds, beside others."""
    runner = Runner(backend, keep)
    decoding, chunked, resumed = runner.request(9), runner.request(30, 1), runner.request(12, 2)
    runner.step([(decoding, 9), (chunked, 13)])
    runner.step([(chunked, 17), (decoding, 1)])
    parts = [len(runner.step([(decoding, 1), (resumed, n), (chunked, 1)]).parts) for n in (100, 1, 33, 1)]
    assert parts[0] >= 3
    assert parts[1] == parts[3] == 1
    for _ in range(40):
        runner.step([(resumed, 1), (chunked, 1), (decoding, 1)])


def test_capture_runs_no_round(backend: Any) -> None:
    runner = Runner(backend, PER_HEAD)
    request = runner.request(10)
    runner.step([(request, 10)])
    while not request.tracked.timeline.due(request.cached):
        runner.step([(request, 1)])
    before = [layer.kv_cache.clone() for layer in runner.layers]
    made = runner.builder.build_for_cudagraph_capture(runner.common([(request, 1)], padded=2))
    (part,) = made.parts
    assert not part.moves
    assert (part.meta.slot_mapping == -1).all()
    for layer, cache in zip(runner.layers, before, strict=True):
        torch.testing.assert_close(layer.kv_cache, cache, rtol=0, atol=0, equal_nan=True)
    runner.step([(request, 1)])  # and the round still runs


@pytest.mark.parametrize("keep", [PER_HEAD, WHOLE_BLOCKS], ids=["per_head", "whole_blocks"])
def test_nothing_is_read_back_from_the_device(backend: Any, keep: dict[str, Any]) -> None:
    """All that would be on the GPU is on the meta device, which has no values: reading one back raises."""
    from kvkeep.vllm.described import Fixed

    runner = Runner(backend, keep)
    meta = torch.device("meta")
    for layer in runner.layers:
        layer.kv_cache = layer.kv_cache.to(meta)
    keeper = runner.builder.keeper
    keeper.described.fixed = Fixed(8, WIDTH * BLOCK, meta)

    def described(common: Any, whole: bool) -> Any:
        assert {x.device for x in (common.seq_lens, common.slot_mapping, common.block_table_tensor)} == {meta}
        return common

    decoding, resumed = runner.request(9), runner.request(12, 2)
    decoding.cached = decoding.tracked.timeline.first  # a round is due
    for rows in ([(decoding, 1)], [(decoding, 1), (resumed, 140)]):
        common = runner.common(rows, padded=4 if len(rows) == 1 else 0)
        on_device = {
            n: getattr(common, n).to(meta)
            for n in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
        }
        parts = list(keeper.parts(common.replace(**on_device), described))
        assert len(parts) > 2 if len(rows) == 2 else len(parts) == 1
        for part in parts:
            part.move(NAMES[0], runner.layers[0].kv_cache)


@pytest.mark.parametrize("backend", ["flash"], indirect=True)
def test_flash_attention_3_plans_from_lengths_in_slots(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """Its plan is made of the lengths that kernels see; parts of a step, which would share its memory, have none."""
    from vllm.v1.attention.backends import flash_attn

    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda **_: 3)
    planned = []

    def plan(**how: Any) -> Tensor:
        planned.append((how["cache_seqlens"].tolist(), how["max_seqlen_k"]))
        return torch.zeros(4, dtype=torch.int32)

    monkeypatch.setattr(flash_attn, "get_scheduler_metadata", plan, raising=False)
    runner = Runner(backend, PER_HEAD)
    first, resumed = runner.request(10), runner.request(12, 1)
    runner.step([(first, 10)])
    for _ in range(60):
        runner.step([(first, 1)])
    # 70 entries were fed; the one at position 69 lies in slot 40 + (69 - 48) % 8, with all slots before it in use.
    assert planned[-1] == ([46], 46)
    before = len(planned)
    parts = runner.step([(first, 1), (resumed, 100)]).parts
    assert len(parts) > 3
    assert len(planned) == before
    assert all(part.meta.scheduler_metadata is None for part in parts)


# ---- who gets what ---------------------------------------------------------------------------------------------------


def test_full_graphs_only_for_single_tokens(backend: Any) -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    builder = backend.get_builder_cls()
    spec: Any = None  # neither looks at it
    assert builder.get_cudagraph_support(_config(PER_HEAD), spec) == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    without = _config(None)
    assert builder.get_cudagraph_support(without, spec) == builder.stock.get_cudagraph_support(without, spec)


def test_inert_where_not_asked_for(backend: Any) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = _config(None)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=DIM, dtype=torch.float32)
    with set_current_vllm_config(config):
        assert backend.get_impl_cls() is backend.stock_impl
        assert backend.customize_spec(spec) == spec
        assert type(backend.get_builder_cls()(spec, NAMES, config, CPU)) is backend.builder.stock

        class Derived(backend.get_builder_cls()):  # type: ignore[misc]  # as vLLM derives cross attention's
            pass

        derived = Derived(spec, NAMES, config, CPU)
    assert type(derived) is Derived
    assert derived.supports_update_block_table == backend.builder.stock.supports_update_block_table
    common = SimpleNamespace(
        num_reqs=1, num_actual_tokens=1, max_query_len=1, max_seq_len=1, query_start_loc=torch.tensor([0, 1]),
        seq_lens=torch.tensor([1]), block_table_tensor=torch.tensor([[1]]), slot_mapping=torch.tensor([16]),
        causal=True, mm_req_doc_ranges=None, rswa_prefix_lens=None,
    )  # fmt: skip
    assert derived.build(0, common).slot_mapping is common.slot_mapping


def test_registered_by_path() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvkeep.vllm.plugin import register

    register()
    for name in ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN"):
        made = AttentionBackendEnum[name].get_class()
        assert made.evicts
        assert made.get_name() == name


# ---- other backends --------------------------------------------------------------------------------------------------


class _Other:
    """Stands for a backend that kvkeep has no class for."""

    @staticmethod
    def get_name() -> str:
        return "FLEX_ATTENTION"


@contextmanager
def _refused(words: str = "--attention-backend FLASH_ATTN") -> Iterator[None]:
    with pytest.raises(Refused, match=words):
        yield


@pytest.mark.parametrize("how", ["asked", "per_kind", "chosen"])
def test_other_backends_are_refused_at_start(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    import kvkeep.vllm.refusals as refusals
    from kvkeep.vllm.tap import RequestTap

    config = _config(PER_HEAD)
    RequestTap(config, CPU, False)  # the CPU's own is fine
    other = AttentionBackendEnum.FLASHINFER
    changes: dict[str, Callable[[], None]] = {
        "asked": lambda: setattr(config.attention_config, "backend", other),
        "per_kind": lambda: config.attention_config.backend_per_kind.update(full_attention=other),
        "chosen": lambda: monkeypatch.setattr(refusals, "get_attn_backend", lambda *_: _Other),
    }
    changes[how]()
    with _refused():
        RequestTap(config, CPU, False)


def test_a_layer_that_would_keep_everything_is_refused() -> None:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.sample.logits_processor import BatchUpdate

    from kvkeep.vllm.tap import RequestTap

    class Layer(AttentionLayerBase):
        sliding_window: int | None = None

        def get_attn_backend(self) -> Any:
            return _Other

        def get_kv_cache_spec(self, vllm_config: Any) -> None:
            return None

    config = _config(PER_HEAD)
    layer = Layer()
    config.compilation_config.static_forward_context["model.layers.2.self_attn.attn"] = layer
    tap, nothing = RequestTap(config, CPU, False), BatchUpdate(batch_size=0, removed=[], added=[], moved=[])
    with _refused(r"model\.layers\.2.*--attention-backend FLASH_ATTN"):
        tap.update_state(nothing)
    layer.sliding_window = 64
    tap.update_state(nothing)
