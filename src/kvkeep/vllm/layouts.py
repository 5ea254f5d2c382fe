"""How the KV cache of one attention layer lies in memory in vLLM 0.32, and how entries move in it.

An entry is one token's key and value of one KV head. vLLM hands a layer's cache to the attention
code as one tensor of logical shape ``[NB, H, BS, 2 D]``: NB blocks, H KV heads, BS entries a block,
D the head size. What the last two axes mean is the backend's business:

- CPU (``vec``, ``vec16``, ``amx``): a (block, head) is one run of ``2 BS D`` elements, first the
  keys, then the values, each in the order in which the kernels of that instruction set read them.
- GPU (``flash_attn``, ``triton``): a row of ``2 D`` elements an entry, first the key, then the
  value. Only the strides differ from one physical layout to another (``LBNHC``, ``LBHNC``,
  ``BLNHC``, ...), so one piece of code serves all.

A layout is therefore a set of strided views in which an entry can be named by its slot. Reading,
writing and moving are then indexing. Nothing here imports vLLM.

Source of the orders: vLLM 0.32, ``v1/attention/backends/{cpu_attn,flash_attn,triton_attn}.py``,
``v1/kv_cache_interface.py``, and its CPU cache writer, against which the tests compare bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

__all__ = ["LAYOUTS", "Layout", "layout_of"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Integers stop at 8 bytes. Indexing copies elements of any type as they are, so a complex number
# is just a word of 16 bytes.
_WORDS = {4: torch.int32, 8: torch.int64, 16: torch.complex128}

At = tuple[Tensor, Tensor]
"""Where entries lie: (block int64 [M], offset in the block int64 [M])."""


@dataclass(frozen=True)
class Layout(ABC):
    """How keys and values of one layer's cache are stored.

    Every method takes the layer's cache as vLLM hands it over, ``[NB, H, BS, 2 D]``, of float32,
    float16 or bfloat16 (``amx``: bfloat16). Entries are named by ``heads`` int64 [M] and a pair
    ``at`` of (block int64 [M], offset in the block int64 [M]), all on the cache's device. On CPU
    they are checked: out of range is a ValueError. On other devices that would need a
    synchronisation, so there nothing is checked and nothing is waited for.

    Attributes:
        name: what vLLM calls the instruction set (CPU) or kvkeep the backend (GPU).
    """

    name: str

    @abstractmethod
    def views(self, cache: Tensor) -> tuple[Tensor, ...]:
        """Views of the cache in which entries can be moved: no copies.

        Returns:
            Tensors ``[NB, H, slot axes..., word axes...]``. The slot axes are those that
            :meth:`_slots` splits an offset into; the rest are the words of one entry.
        """

    @abstractmethod
    def _slots(self, offset: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        """For each view, the indices of the slot axes for offsets int64 [M]."""

    @abstractmethod
    def _words(self, keys: Tensor, values: Tensor, views: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Keys and values [M, D] as the words of each view."""

    @abstractmethod
    def _entries(self, words: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The inverse of :meth:`_words`."""

    def move(self, cache: Tensor, heads: Tensor, src: At, dst: At) -> None:
        """Copy entries in place. All sources are read before anything is written.

        Args:
            cache: the layer's cache.
            heads: KV head of each entry, int64 [M]; source and destination share it.
            src: where the entries lie.
            dst: where they go. No (head, place) may occur twice, unless it is written with the same entry.

        Raises:
            ValueError: the cache does not have this layout's shape or dtype, or (CPU) an index is out of range.
        """
        _check_indices(cache, heads, src)
        _check_indices(cache, heads, dst)
        views = self.views(cache)
        taken = self._take(views, heads, src)
        self._put(views, heads, dst, taken)

    def read(self, cache: Tensor, heads: Tensor, at: At) -> tuple[Tensor, Tensor]:
        """Keys and values of entries, copied out.

        Returns:
            Keys and values, each [M, D], of the cache's dtype.

        Raises:
            ValueError: as :meth:`move`.
        """
        _check_indices(cache, heads, at)
        return self._entries(self._take(self.views(cache), heads, at), cache.dtype)

    def write(self, cache: Tensor, heads: Tensor, at: At, keys: Tensor, values: Tensor) -> None:
        """Store keys and values, each [M, D] of the cache's dtype: the inverse of :meth:`read`.

        Raises:
            ValueError: as :meth:`move`, or keys or values of another shape or dtype.
        """
        _check_indices(cache, heads, at)
        shape = (heads.shape[0], cache.shape[3] // 2)
        for what, tensor in (("keys", keys), ("values", values)):
            if tensor.shape != shape or tensor.dtype != cache.dtype:
                raise ValueError(
                    f"{what} have shape {tuple(tensor.shape)} and dtype {tensor.dtype}; "
                    f"this cache takes {shape} and {cache.dtype}"
                )
        views = self.views(cache)
        self._put(views, heads, at, self._words(keys, values, views))

    # Milliseconds a move of one layer, on caches in turn that together outgrow the processor's own 32 MB; AMD EPYC
    # with AVX-512, one thread. Rows x heads x r, D, left 16 x 2 x 64, 64 and right 16 x 8 x 128, 128:
    #                                               vec bf16    vec fp32    amx         rows bf16
    #   block, head and slot as index tensors       0.44  6.3   0.62  10.4  0.88  11.0  0.30  4.2
    #   so, rows in 16-byte words (this code)       0.41  5.0   0.57   9.5  0.85  10.9  0.17  2.1
    #   one linear index, overlapping as_strided    0.43  4.9   0.60   9.5  0.81   9.6  0.19  2.1
    #   the same by index_select and index_copy_    0.46  5.6   0.61  10.9  0.83   8.7  0.22  3.2
    #   numpy on the same memory                    0.36  4.8   0.53   9.7  0.71   8.2  0.14  1.7
    #   one linear index, entries as the last axis  1.54 27.4   1.90  36.3  1.54  28.1  1.02 25.1
    # gather and scatter_ (what take_along_dim does) copy the whole cache for 16-bit elements: 250 ms and more.
    # numpy is the fastest on one thread but stays there, and knows no GPU; two free threads halve torch's times. The
    # single linear index would win a tenth on amx and lose the bounds check of each axis.
    def _take(self, views: tuple[Tensor, ...], heads: Tensor, at: At) -> tuple[Tensor, ...]:
        block, offset = at
        slots = self._slots(offset)
        return tuple(view[(block, heads, *slot)] for view, slot in zip(views, slots, strict=True))

    def _put(self, views: tuple[Tensor, ...], heads: Tensor, at: At, words: tuple[Tensor, ...]) -> None:
        block, offset = at
        for view, slot, word in zip(views, self._slots(offset), words, strict=True):
            view[(block, heads, *slot)] = word


class _Vec(Layout):
    """Keys ``[D][BS]``, values ``[BS][D]``."""

    def views(self, cache: Tensor) -> tuple[Tensor, ...]:
        keys, values, block, dim = _halves(self.name, cache)
        shape = keys.shape[:2]
        return keys.view(*shape, dim, block).transpose(2, 3), _wide(values.view(*shape, block, dim))

    def _slots(self, offset: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        return (offset,), (offset,)

    def _words(self, keys: Tensor, values: Tensor, views: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return keys, values.contiguous().view(views[1].dtype)

    def _entries(self, words: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return words[0], words[1].view(dtype)


class _Amx(Layout):
    """Keys ``[BS/16][D/2][16][2]``, values ``[D/16][BS/2][16][2]``, bfloat16.

    The last 2 of the keys are neighbours of one entry, so its keys are 32-bit words; those of the
    values are two entries, so theirs are not.
    """

    def views(self, cache: Tensor) -> tuple[Tensor, ...]:
        keys, values, block, dim = _halves(self.name, cache)
        if cache.dtype != torch.bfloat16 or block % 16 or dim % 16:
            raise ValueError(
                f"a cache of layout 'amx' is bfloat16 with BS and D multiples of 16; got {cache.dtype}, "
                f"BS = {block}, D = {dim}"
            )
        shape = keys.shape[:2]
        keys = keys.view(torch.int32).view(*shape, block // 16, dim // 2, 16)
        values = values.view(*shape, dim // 16, block // 2, 16, 2)
        return keys.transpose(3, 4), values.permute(0, 1, 3, 5, 2, 4)

    def _slots(self, offset: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        return (offset >> 4, offset & 15), (offset >> 1, offset & 1)

    def _words(self, keys: Tensor, values: Tensor, views: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return keys.contiguous().view(torch.int32), values.unflatten(1, (-1, 16))

    def _entries(self, words: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return words[0].view(dtype), words[1].flatten(1)


class _Rows(Layout):
    """A row an entry, the key before the value, at any strides."""

    def views(self, cache: Tensor) -> tuple[Tensor, ...]:
        _check_cache(self.name, cache)
        return (_wide(cache),)

    def _slots(self, offset: Tensor) -> tuple[tuple[Tensor, ...], ...]:
        return ((offset,),)

    def _words(self, keys: Tensor, values: Tensor, views: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (torch.cat([keys, values], dim=1).view(views[0].dtype),)

    def _entries(self, words: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        keys, values = words[0].view(dtype).chunk(2, dim=1)
        return keys, values


LAYOUTS: dict[str, Layout] = {
    layout.name: layout for layout in (_Vec("vec"), _Vec("vec16"), _Amx("amx"), _Rows("flash_attn"), _Rows("triton"))
}
"""The layouts by name: vLLM's instruction sets on CPU, and attention backends on GPU."""


def layout_of(isa: str) -> Layout:
    """The layout of an instruction set of vLLM's CPU attention, or of a GPU backend.

    Raises:
        ValueError: an unknown one.
    """
    if isa not in LAYOUTS:
        raise ValueError(
            f"kvkeep does not know how vLLM's attention {isa!r} lays out its cache; it knows {', '.join(LAYOUTS)}"
        )
    return LAYOUTS[isa]


def _check_cache(name: str, cache: Tensor) -> None:
    if cache.dim() != 4 or cache.shape[3] % 2 or cache.dtype not in _DTYPES:
        raise ValueError(
            f"a cache of layout {name!r} has shape [blocks, heads, block size, 2 * head size] and dtype float32, "
            f"float16 or bfloat16; got {tuple(cache.shape)} and {cache.dtype}"
        )


def _halves(name: str, cache: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Keys and values of a CPU cache, flat: each [NB, H, BS * D]; BS; D."""
    _check_cache(name, cache)
    blocks, heads, block, width = cache.shape
    if cache.stride()[2:] != (width, 1):
        raise ValueError(
            f"a cache of layout {name!r} holds each (block, head) as one run; got strides {cache.stride()} for shape "
            f"{tuple(cache.shape)} (vLLM's layout LBHNC has them)"
        )
    keys, values = cache.view(blocks, heads, 2, block * width // 2).unbind(2)
    return keys, values, block, width // 2


def _wide(rows: Tensor) -> Tensor:
    """The same memory with the last axis in the widest words that its size and place allow: fewer copies to make."""
    if rows.stride(-1) != 1:
        return rows
    elements = gcd(rows.shape[-1], rows.storage_offset(), *rows.stride()[:-1])
    word = gcd(16, elements * rows.element_size())
    return rows.view(_WORDS[word]) if word > rows.element_size() else rows


def _check_indices(cache: Tensor, heads: Tensor, at: At) -> None:
    """Refuse what indexing would take silently: negative numbers, tensors that broadcast or pick by mask."""
    shape = heads.shape
    limits = cache.shape[1], cache.shape[0], cache.shape[2]
    for what, index, limit in zip(("heads", "blocks", "offsets"), (heads, *at), limits, strict=True):
        if index.dtype != torch.int64 or index.dim() != 1 or index.shape != shape:
            raise ValueError(
                f"{what} of entries are int64 of shape [{shape.numel()}]; got {index.dtype}, {list(index.shape)}"
            )
        if index.device.type == "cpu" and shape.numel():
            low, high = (int(x) for x in torch.aminmax(index))
            if low < 0 or high >= limit:
                raise ValueError(f"{what} of entries run from {low} to {high}; this cache has 0 to {limit - 1}")
