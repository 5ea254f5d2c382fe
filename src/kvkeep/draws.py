"""Counter-based random numbers: a pure function of (seed, stream, layer, head, round, rank).

There is no generator and no state. The same six numbers give the same bits on CPU, GPU and in any
batch, so a draw can be replayed after a preemption or checked from the outside. Only wrapping
integer operations are used, which every backend defines identically.

For fixed (seed, stream, layer, head, round) the key is a bijection of the rank on 32-bit integers:
two candidates of a head can never tie.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from . import cpu

_MASK64 = (1 << 64) - 1


def _signed64(value: int) -> int:
    """The signed 64-bit integer with the same bits."""
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _signed32(value: int) -> int:
    """The signed 32-bit integer with the same bits."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


_WEYL, _MIX_A, _MIX_B = (_signed64(c) for c in (cpu.WEYL, cpu.MIX_A, cpu.MIX_B))
_RANK_STEP, _KEY_A, _KEY_B = (_signed32(c) for c in (cpu.RANK_STEP, cpu.KEY_A, cpu.KEY_B))


def _mix64(x: Tensor) -> Tensor:
    # Tensors shift arithmetically; the mask makes the shift logical, which keeps the mix a bijection.
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MIX_A
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MIX_B
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def stream_of(prompt_ids: Sequence[int], sample: int) -> int:
    """The stream of a request: a 64-bit hash of its prompt and its sample number.

    Args:
        prompt_ids: token ids of the prompt, without padding.
        sample: what tells two requests with the same prompt apart (in the transformers engine the
            occurrence number among equal prompts or the row's own seed; in vLLM the request's seed).

    Returns:
        A signed 64-bit integer.
    """
    digest = hashlib.blake2b(digest_size=8)
    digest.update(_signed64(sample).to_bytes(8, "little", signed=True))
    for token in prompt_ids:
        digest.update(int(token).to_bytes(8, "little", signed=True))
    return int.from_bytes(digest.digest(), "little", signed=True)


def round_words(seed: int, streams: Tensor, layers: Tensor, heads: Tensor, rounds: Tensor) -> Tensor:
    """One 64-bit word for each (row, layer, head) of a round.

    Args:
        seed: the run's seed.
        streams: int64 [R], one stream a row.
        layers: int64 [L], global layer numbers.
        heads: int64 [H], global KV head (or group) numbers.
        rounds: int64 [R], each row's round number.

    Returns:
        int64 [R, L, H].
    """
    if streams.device.type == "cpu":
        return cpu.round_words(seed, streams, layers, heads, rounds)
    return _round_words(seed, streams, layers, heads, rounds)


def _round_words(seed: int, streams: Tensor, layers: Tensor, heads: Tensor, rounds: Tensor) -> Tensor:
    x = _mix64(streams + _signed64(seed * _WEYL))
    x = _mix64(x ^ (rounds * _WEYL))  # [R]
    x = _mix64(x[:, None] ^ ((layers + 1) * _WEYL))  # [R, L]
    return _mix64(x[:, :, None] ^ ((heads + 1) * _WEYL))  # [R, L, H]


def rank_keys(words: Tensor, ranks: Tensor) -> Tensor:
    """Random keys of the candidates; the lowest are the victims.

    Args:
        words: int64 [...], from :func:`round_words`.
        ranks: int32 [C], candidate indices in the virtual layout.

    Returns:
        int32 [..., C], distinct along the last axis and uniform on the 32-bit integers.
    """
    if words.device.type == "cpu":
        return cpu.rank_keys(words, ranks)
    return _rank_keys(words, ranks)


def _rank_keys(words: Tensor, ranks: Tensor) -> Tensor:
    # Brought into range first: what an out-of-range cast does is not defined on every backend.
    low = (((words & 0xFFFFFFFF) ^ (1 << 31)) - (1 << 31)).to(torch.int32).unsqueeze(-1)
    high = (words >> 32).to(torch.int32).unsqueeze(-1)
    x = ranks * _RANK_STEP + low
    shifted = torch.empty_like(x)

    def xorshift(bits: int) -> None:
        torch.bitwise_right_shift(x, bits, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - bits)) - 1))

    xorshift(16)
    x.mul_(_KEY_A)
    xorshift(15)
    # The second half of the word enters between the two multiplications: with only one added
    # constant, two heads whose words are close would draw shifted copies of one sequence.
    x.add_(high).mul_(_KEY_B)
    xorshift(15)
    return x


def apart(words: Tensor, purpose: int) -> Tensor:
    """Words for another purpose than :func:`round_words`' own, which is to draw victims.

    Args:
        words: int64 [...], from :func:`round_words`.
        purpose: at least 1; each use of draws in the library has its own.

    Returns:
        int64 [...]; what is drawn with them tells nothing of what is drawn with ``words``.
    """
    return _mix64(words ^ _signed64(purpose * cpu.WEYL))


def uniforms(words: Tensor, ranks: Tensor) -> Tensor:
    """Uniform numbers strictly between 0 and 1: the middles of 2^23 equal parts.

    Args:
        words: int64 [...].
        ranks: int32 [C].

    Returns:
        float32 [..., C], from 2^-24 to 1 - 2^-24, all exact.
    """
    bits = (rank_keys(words, ranks) >> 9) & ((1 << 23) - 1)
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-23)
