"""Moving, reading and writing entries of vLLM's caches: against plain addresses and against vLLM's own kernels."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvkeep.vllm.layouts import LAYOUTS, layout_of

CPU = ("vec", "vec16", "amx")
GPU = ("flash_attn", "triton")
BITS = {2: torch.int16, 4: torch.int32}
# Physical orders of vLLM 0.32 (KVCacheLayout), as the order of the logical axes L, B, H, N, C in memory.
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


def dtypes(name: str) -> tuple[torch.dtype, ...]:
    return (torch.bfloat16,) if name == "amx" else (torch.float32, torch.float16, torch.bfloat16)


def bits(tensor: Tensor) -> Tensor:
    """Elements as integers: NaNs and signed zeros compare too."""
    return tensor.contiguous().view(BITS[tensor.element_size()])


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bit patterns, NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)
    return words.to(BITS[dtype.itemsize]).view(dtype)


def addresses(name: str, block: int, dim: int) -> tuple[Tensor, Tensor]:
    """Element of a (block, head) that holds part d of the key and value of offset o: int64 [BS, D] each."""
    o, d = torch.meshgrid(torch.arange(block), torch.arange(dim), indexing="ij")
    if name in GPU:
        return o * 2 * dim + d, o * 2 * dim + dim + d
    if name == "amx":
        keys = ((o // 16) * (dim // 2) + d // 2) * 32 + (o % 16) * 2 + d % 2
        values = ((d // 16) * (block // 2) + o // 2) * 32 + (d % 16) * 2 + o % 2
    else:
        keys, values = d * block + o, o * dim + d
    return keys, values + block * dim


def decoded(name: str, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of a cache by address: [NB, H, BS, D] each."""
    keys, values = addresses(name, cache.shape[2], cache.shape[3] // 2)
    flat = cache.flatten(2)
    return flat[:, :, keys], flat[:, :, values]


def encoded(name: str, keys: Tensor, values: Tensor) -> Tensor:
    """The cache [NB, H, BS, 2 D] that holds these keys and values."""
    blocks, heads, block, dim = keys.shape
    flat = torch.empty(blocks, heads, block * 2 * dim, dtype=keys.dtype)
    at = addresses(name, block, dim)
    flat[:, :, at[0]], flat[:, :, at[1]] = keys, values
    return flat.view(blocks, heads, block, 2 * dim)


Places = tuple[Tensor, Tensor]
Moves = tuple[Tensor, Places, Places]


def random_moves(shape: tuple[int, ...], seed: int) -> Moves:
    """Distinct destinations, sources anywhere in the same heads; some entries stay where they are, listed twice."""
    rng = random.Random(seed)
    blocks, heads, block = shape
    places = [(b, h, o) for b in range(blocks) for h in range(heads) for o in range(block)]
    targets = rng.sample(places, rng.randint(0, min(50, len(places))))
    moves = []
    for b, h, o in targets:
        source = (b, o) if rng.random() < 0.2 else (rng.randrange(blocks), rng.randrange(block))
        moves += [(h, *source, b, o)] * (2 if source == (b, o) else 1)
    rng.shuffle(moves)
    head, sb, so, db, do = torch.tensor(moves, dtype=torch.int64).reshape(-1, 5).unbind(1)
    return head, (sb, so), (db, do)


def moved(dense: Tensor, moves: Moves) -> Tensor:
    """Entries [NB, H, BS, D] after the moves, one by one, from a copy of what was there."""
    out = dense.clone()
    heads, (sb, so), (db, do) = moves
    for h, b, o, b2, o2 in zip(*(x.tolist() for x in (heads, sb, so, db, do)), strict=True):
        out[b2, h, o2] = dense[b, h, o]
    return out


@st.composite
def caches(draw: st.DrawFn) -> tuple[str, Tensor]:
    name = draw(st.sampled_from(sorted(LAYOUTS)))
    block = draw(st.sampled_from((32, 64, 128) if name in CPU else (16, 32, 64, 128)))
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 3)), block, 2 * draw(st.sampled_from((32, 64, 80, 96, 128))))
    return name, noise(shape, draw(st.sampled_from(dtypes(name))), draw(st.integers(0, 2**31)))


@settings(max_examples=150, deadline=None)
@given(caches(), st.integers(0, 2**31))
def test_move_is_reading_all_then_writing(made: tuple[str, Tensor], seed: int) -> None:
    name, cache = made
    moves = random_moves(tuple(cache.shape[:3]), seed)
    keys, values = (moved(x, moves) for x in decoded(name, cache))
    expected = encoded(name, keys, values)
    with torch.inference_mode():
        layout_of(name).move(cache, *moves)
    assert torch.equal(bits(cache), bits(expected))


@settings(max_examples=100, deadline=None)
@given(caches(), st.integers(0, 2**31))
def test_read_and_write_follow_the_addresses(made: tuple[str, Tensor], seed: int) -> None:
    name, cache = made
    heads, _, (block, offset) = random_moves(tuple(cache.shape[:3]), seed)
    dense = decoded(name, cache)
    read = layout_of(name).read(cache, heads, (block, offset))
    for part, all_ in zip(read, dense, strict=True):
        assert part.dtype == cache.dtype
        assert torch.equal(bits(part), bits(all_[block, heads, offset]))
    # Entries written twice get the same twice, so that the order does not matter.
    place = (block * cache.shape[1] + heads) * cache.shape[2] + offset
    table = noise((2, cache.shape[:3].numel(), cache.shape[3] // 2), cache.dtype, seed + 1)
    keys, values = (part[place].t().contiguous().t() for part in table)  # as no caller need lay them out for us
    for into, new in zip(dense, (keys, values), strict=True):
        into[block, heads, offset] = new
    layout_of(name).write(cache, heads, (block, offset), keys, values)
    assert torch.equal(bits(cache), bits(encoded(name, *dense)))


@pytest.mark.parametrize("name", GPU)
@pytest.mark.parametrize("order", sorted(ORDERS))
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("lead", [0, 1], ids=["aligned", "one element off"])
def test_rows_at_the_strides_of_every_physical_order(name: str, order: str, heads: int, lead: int) -> None:
    logical = (3, 4, heads, 16, 2 * 80)
    axes = ORDERS[order]
    storage = noise((lead + torch.Size(logical).numel(),), torch.float16, 1)

    def layers(flat: Tensor) -> Tensor:
        physical = flat[lead:].view([logical[a] for a in axes])
        return physical.permute([axes.index(a) for a in range(5)])

    moves = random_moves((4, heads, 16), 2)
    expected = storage.clone()
    layers(expected)[1] = moved(layers(storage)[1], moves)
    cache = layers(storage)[1]
    keys, values = layout_of(name).read(cache, moves[0], moves[1])
    row = cache[moves[1][0], moves[0], moves[1][1]]
    assert torch.equal(bits(torch.cat([keys, values], dim=1)), bits(row))
    layout_of(name).move(cache, *moves)
    assert torch.equal(bits(storage), bits(expected))


@pytest.mark.parametrize("name", GPU)
@pytest.mark.parametrize(("padding", "step"), [(1, 1), (4, 1), (160, 2)])
def test_rows_that_lie_apart(name: str, padding: int, step: int) -> None:
    storage = noise((4, 3, 16, 160 + padding), torch.bfloat16, 8)
    moves = random_moves((4, 3, 16), 9)
    expected = storage.clone()
    expected[..., : 160 * step : step] = moved(storage[..., : 160 * step : step], moves)
    layout_of(name).move(storage[..., : 160 * step : step], *moves)
    assert torch.equal(bits(storage), bits(expected))


@pytest.mark.parametrize("name", CPU)
def test_cpu_blocks_may_lie_apart(name: str) -> None:
    storage = noise((3, 2 * 32 * 64 + 32), torch.bfloat16, 3)
    cache = storage[:, : 2 * 32 * 64].view(3, 2, 32, 64)
    moves = random_moves((3, 2, 32), 4)
    expected = encoded(name, *(moved(x, moves) for x in decoded(name, cache)))
    padding = storage[:, 2 * 32 * 64 :].clone()
    layout_of(name).move(cache, *moves)
    assert torch.equal(bits(cache), bits(expected))
    assert torch.equal(bits(storage[:, 2 * 32 * 64 :]), bits(padding))


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_views_cover_the_cache_once(name: str) -> None:
    cache = torch.ones(2, 3, 64, 192, dtype=torch.bfloat16)
    views = layout_of(name).views(cache)
    assert sum(v.numel() * v.element_size() for v in views) == cache.numel() * 2
    assert (name == "amx") == (views[0].dtype == torch.int32)
    for view in views:
        assert view.shape[:2] == (2, 3)
        view.zero_()
    assert not cache.any()


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_nothing_waits_for_a_device(name: str) -> None:
    # Tensors of the device "meta" have no values: reading one on the host would raise.
    cache = torch.empty(4, 2, 32, 128, dtype=torch.bfloat16, device="meta")
    heads, block, offset = torch.zeros(3, 5, dtype=torch.int64, device="meta")
    layout = layout_of(name)
    layout.move(cache, heads, (block, offset), (block, offset))
    keys, values = layout.read(cache, heads, (block, offset))
    layout.write(cache, heads, (block, offset), keys, values)
    assert keys.shape == values.shape == (5, 64)


def test_an_unknown_isa_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'neon'.*vec, vec16, amx, flash_attn, triton"):
        layout_of("neon")


def index(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize(
    ("heads", "block", "offset", "says"),
    [
        (index(0, 2), index(0, 0), index(0, 1), "heads of entries run from 0 to 2; this cache has 0 to 1"),
        (index(0, 1), index(0, -1), index(0, 1), "blocks of entries run from -1 to 0; this cache has 0 to 3"),
        (index(0, 1), index(0, 1), index(0, 32), "offsets of entries run from 0 to 32; this cache has 0 to 31"),
        (index(0, 1), index(0), index(0, 1), r"blocks of entries are int64 of shape \[2\]; got torch.int64, \[1\]"),
        (index(0, 1), index(0, 1), index(0, 1) > 0, r"offsets of entries are int64 .* got torch.bool, \[2\]"),
    ],
)
def test_wrong_indices_are_refused_before_anything_is_written(
    name: str, heads: Tensor, block: Tensor, offset: Tensor, says: str
) -> None:
    cache = noise((4, 2, 32, 64), torch.bfloat16, 5)
    before = cache.clone()
    fine = index(1, 2), index(3, 4)
    if heads.max() < 2:
        with pytest.raises(ValueError, match=says):
            layout_of(name).move(cache, heads, fine, (block, offset))
    with pytest.raises(ValueError, match=says):
        layout_of(name).move(cache, heads, (block, offset), fine)
    with pytest.raises(ValueError, match=says):
        layout_of(name).read(cache, heads, (block, offset))
    with pytest.raises(ValueError, match=says):
        layout_of(name).write(cache, heads, (block, offset), cache[0, :, 0, :32], cache[0, :, 0, :32])
    assert torch.equal(bits(cache), bits(before))


@pytest.mark.parametrize(
    ("name", "cache", "says"),
    [
        ("vec", torch.zeros(2, 2, 32, 2, 32), "has shape .blocks, heads"),
        ("triton", torch.zeros(2, 2, 32, 33), "has shape .blocks, heads"),
        ("flash_attn", torch.zeros(2, 2, 32, 64, dtype=torch.uint8), "float16 or bfloat16; got .* torch.uint8"),
        ("vec16", torch.zeros(2, 32, 2, 64).transpose(1, 2), "one run; got strides"),
        ("amx", torch.zeros(2, 2, 32, 64), "is bfloat16 .* got torch.float32, BS = 32, D = 32"),
        ("amx", torch.zeros(2, 2, 24, 64, dtype=torch.bfloat16), "BS = 24"),
    ],
)
def test_a_cache_of_another_shape_is_refused(name: str, cache: Tensor, says: str) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(ValueError, match=says):
        layout_of(name).move(cache, none, (none, none), (none, none))


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_keys_of_another_dtype_or_shape_are_not_written(name: str) -> None:
    cache = noise((4, 2, 32, 64), torch.bfloat16, 6)
    heads, at = index(0, 1), (index(0, 1), index(0, 1))
    good = torch.zeros(2, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"keys have .* torch.float32; this cache takes \(2, 32\) and torch.bfloat16"):
        layout_of(name).write(cache, heads, at, good.float(), good)
    with pytest.raises(ValueError, match=r"values have shape \(1, 32\)"):
        layout_of(name).write(cache, heads, at, good, good[:1])


# Against vLLM's own kernels ------------------------------------------------------------------------------------------


def kernels(name: str) -> Any:
    """vLLM's CPU kernels; skips where the processor lacks what the layout needs."""
    from vllm import _custom_ops as ops

    if name == "amx" and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM has its AMX layout only on processors with AVX-512")
    return ops


def written(ops: Any, name: str, keys: Tensor, values: Tensor, slots: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A cache of zeros [NB, H, BS, 2 D] into which vLLM wrote keys and values [T, H, D] at slots [T]."""
    cache = torch.zeros(shape, dtype=keys.dtype)
    blocks, heads, block, width = shape
    halves = cache.view(blocks, heads, 2 * block, width // 2).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys, values, *halves, slots, name)
    return cache


def attended(ops: Any, name: str, cache: Tensor, query: Tensor, table: Tensor, length: int) -> Tensor:
    """What vLLM's attention makes of one query [1, HQ, D] over the first ``length`` slots of a block table."""
    blocks, heads, block, width = cache.shape
    dim = width // 2
    starts, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        1, query.shape[1], heads, dim, lengths, query.dtype, starts, True, -1, name, False
    )
    halves = cache.view(blocks, heads, 2 * block, dim).chunk(2, dim=2)
    out = torch.zeros_like(query)
    ops.cpu_attention_with_kv_cache(
        query, *halves, out, starts, lengths, dim**-0.5, True, None, -1, table[None].int(), 0, plan, None
    )
    return out


VLLM_CASES = [
    pytest.param(name, block, dim, dtype, id=f"{name}-{block}-{dim}-{str(dtype)[6:]}")
    for name, dims in (("vec", (32, 64, 96, 128)), ("vec16", (32, 64, 80, 128)), ("amx", (32, 64, 96, 128)))
    for block in (32, 64, 128)
    for dim in dims
    for dtype in dtypes(name)
]


def scene(block: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Keys and values [T, 2, D] that fill two blocks and part of a third, the table, slots, the cache's shape."""
    generator = torch.Generator().manual_seed(block + dim)
    length, heads, blocks = 2 * block + 5, 2, 5
    keys, values = torch.randn(2, length, heads, dim, generator=generator).to(dtype)
    table = torch.randperm(blocks, generator=generator)[:3]
    at = torch.arange(length)
    return keys, values, table, table[at // block] * block + at % block, (blocks, heads, block, 2 * dim)


def entries(table: Tensor, block: int, slots: Tensor) -> tuple[Tensor, Places]:
    """Heads and places of slots [H, m], flat."""
    flat = slots.flatten()
    return torch.arange(len(slots)).repeat_interleave(slots.shape[1]), (table[flat // block], flat % block)


@pytest.mark.vllm
@pytest.mark.parametrize(("name", "block", "dim", "dtype"), VLLM_CASES)
def test_reads_and_writes_what_vllm_writes(name: str, block: int, dim: int, dtype: torch.dtype) -> None:
    ops = kernels(name)
    keys, values, table, slots, shape = scene(block, dim, dtype)
    cache = written(ops, name, keys, values, slots, shape)
    heads, at = entries(table, block, torch.arange(len(keys)).expand(2, -1))
    flat = [x.transpose(0, 1).flatten(0, 1) for x in (keys, values)]
    for ours, given_ in zip(layout_of(name).read(cache, heads, at), flat, strict=True):
        assert torch.equal(ours, given_)
    own = torch.zeros_like(cache)
    layout_of(name).write(own, heads, at, *flat)
    assert torch.equal(bits(own), bits(cache))


def after_a_round(ops: Any, name: str, block: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The newest 20 entries overwrite victims, other ones in each head.

    Returns:
        The cache, the cache that vLLM writes if it is given the entries where they lie now, these keys and values
        [T, H, D] without the newest, and the block table.
    """
    keys, values, table, slots, shape = scene(block, dim, dtype)
    kept = len(keys) - 20
    cache = written(ops, name, keys, values, slots, shape)
    generator = torch.Generator().manual_seed(7)
    victims = torch.stack([torch.randperm(kept, generator=generator)[:20] for _ in range(2)])
    heads, dst = entries(table, block, victims)
    _, src = entries(table, block, torch.arange(kept, kept + 20).expand(2, -1))
    layout_of(name).move(cache, heads, src, dst)
    for head in range(2):
        for part in (keys, values):
            part[victims[head], head] = part[kept:, head].clone()
    return cache, written(ops, name, keys, values, slots, shape), keys[:kept], values[:kept], table


@pytest.mark.vllm
@pytest.mark.parametrize(("name", "block", "dim", "dtype"), VLLM_CASES)
def test_a_round_leaves_the_cache_vllm_would_have_written(name: str, block: int, dim: int, dtype: torch.dtype) -> None:
    cache, expected, *_ = after_a_round(kernels(name), name, block, dim, dtype)
    assert torch.equal(bits(cache), bits(expected))


@pytest.mark.vllm
@pytest.mark.parametrize(("name", "block", "dim", "dtype"), VLLM_CASES)
def test_vllm_attends_to_what_a_round_kept(name: str, block: int, dim: int, dtype: torch.dtype) -> None:
    ops = kernels(name)
    if name == "amx" and not (torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()):
        pytest.skip("this processor has no AMX tiles, so vLLM's AMX attention cannot run here")
    cache, _, keys, values, table = after_a_round(ops, name, block, dim, dtype)
    query = torch.randn(1, 4, dim, generator=torch.Generator().manual_seed(8)).to(dtype)
    out = attended(ops, name, cache, query, table, len(keys))
    k, v = (x.double().repeat_interleave(2, dim=1) for x in (keys, values))
    weights = (torch.einsum("hd,thd->ht", query[0].double(), k) * dim**-0.5).softmax(dim=-1)
    close = {torch.float32: 4e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(out[0].double(), torch.einsum("ht,thd->hd", weights, v), atol=close, rtol=0)
