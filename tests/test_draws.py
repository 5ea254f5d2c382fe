"""Draws: bit-exact everywhere, pure functions of six numbers, and fair. The whole method rests on them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from kvkeep.budget import Budget
from kvkeep.draws import rank_keys, round_words, stream_of
from kvkeep.policies import RandomAttention
from kvkeep.protection import Protection
from reference import joint_inclusion, overlap_is_hypergeometric, simulate, uniform_inclusion, victims_of

P_MIN = 1e-4
U64, U32 = np.uint64, np.uint32


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


# ---- the same bits, written again with unsigned numpy integers --------------------------------


def mix64(x: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser as published: unsigned, logical shifts."""
    x = (x ^ (x >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> U64(27))) * U64(0x94D049BB133111EB)
    return x ^ (x >> U64(31))


def numpy_words(seed: int, stream: int, layer: int, head: int, number: int) -> int:
    weyl = 0x9E3779B97F4A7C15

    def u(value: int) -> np.ndarray:
        return np.array([value % 2**64], dtype=U64)

    x = mix64(u(stream + seed * weyl))
    for value in (number * weyl, (layer + 1) * weyl, (head + 1) * weyl):
        x = mix64(x ^ u(value))
    return int(x[0])


def numpy_keys(word: int, ranks: np.ndarray) -> np.ndarray:
    x = ranks.astype(U32) * U32(0x9E3779B1) + U32(word & 0xFFFFFFFF)
    x = (x ^ (x >> U32(16))) * U32(0x21F0AAAD)
    x = ((x ^ (x >> U32(15))) + U32(word >> 32)) * U32(0xD35A2D97)
    return x ^ (x >> U32(15))


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("seed", [0, 1, 2, 7, -1, 2**31, 123456789, 2**63 - 1, 2**63, -(2**63)])
def test_bits_equal_an_unsigned_reimplementation(seed: int) -> None:
    """Signed tensors with masked shifts must mean unsigned arithmetic, for any seed and any stream."""
    streams = [0, 1, -1, 2**63 - 1, -(2**63), 987654321987]
    layers, heads, rounds = [0, 1, 127], [0, 3, 63], [0, 1, 2, 1000, 10**6, 2**40]
    words = round_words(seed, ids(*streams), ids(*layers), ids(*heads), ids(*rounds))
    assert words.dtype == torch.int64
    ranks = np.array([0, 1, 2, 63, 64, 2047, 2**16, 2**24 - 1])
    keys = rank_keys(words, torch.tensor(ranks, dtype=torch.int32))
    assert keys.dtype == torch.int32
    for r, (stream, number) in enumerate(zip(streams, rounds, strict=True)):
        for i, layer in enumerate(layers):
            for j, head in enumerate(heads):
                expected = numpy_words(seed, stream, layer, head, number)
                assert int(words[r, i, j]) % 2**64 == expected
                np.testing.assert_array_equal(keys[r, i, j].numpy().view(U32), numpy_keys(expected, ranks))


def test_keys_of_a_head_never_tie() -> None:
    """The key is a bijection of the rank: without ties, topk has one answer on every device."""
    words = round_words(5, ids(1, 2), ids(0, 1), ids(0, 1, 2), ids(0, 9))
    words = torch.cat([words.flatten(), ids(0, -1, 2**63 - 1, -(2**63), 2**31, 0xFFFFFFFF)])
    keys = rank_keys(words, torch.arange(2**16, dtype=torch.int32)).sort(dim=-1).values
    assert bool((keys.diff(dim=-1) > 0).all())


def test_draws_do_not_depend_on_company() -> None:
    """A row, layer or head draws the same alone, in a batch, and on a pipeline or tensor parallel rank."""
    streams, layers, heads, rounds = ids(11, 22, 33), torch.arange(6), torch.arange(8), ids(4, 0, 9)
    every = round_words(3, streams, layers, heads, rounds)
    for i in range(3):
        assert torch.equal(round_words(3, streams[i : i + 1], layers, heads, rounds[i : i + 1])[0], every[i])
    assert torch.equal(round_words(3, streams, layers[3:], heads[4:6], rounds), every[:, 3:, 4:6])
    assert torch.equal(round_words(3, streams.flip(0), layers, heads, rounds.flip(0)).flip(0), every)
    few, many = torch.arange(10, dtype=torch.int32), torch.arange(500, dtype=torch.int32)
    assert torch.equal(rank_keys(every, many)[..., :10], rank_keys(every, few))
    assert torch.equal(rank_keys(every[1:2, 2:3], few), rank_keys(every, few)[1:2, 2:3])


def test_draws_leave_the_global_generator_alone() -> None:
    """A policy that advanced torch's generator would change what a sampled model says."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    rank_keys(round_words(0, ids(1), ids(0), ids(0), ids(0)), torch.arange(8, dtype=torch.int32))
    assert torch.equal(torch.get_rng_state(), before)


def test_every_coordinate_changes_the_words() -> None:
    """No two of the six numbers may be confused, e.g. (layer 1, head 0) with (layer 0, head 1)."""
    words = torch.stack(
        [round_words(s, torch.arange(8), torch.arange(8), torch.arange(8), torch.arange(8)) for s in range(4)]
    )
    assert words.unique().numel() == words.numel()
    rounds = torch.stack([round_words(0, ids(5), torch.arange(8), torch.arange(8), ids(n)) for n in range(50)])
    assert rounds.unique().numel() == rounds.numel()


def test_streams_tell_requests_apart() -> None:
    """Equal prompts with equal sample numbers replay; anything else differs."""
    assert stream_of([1, 2, 3], 0) == stream_of((1, 2, 3), 0)
    assert stream_of([1, 2, 3], 0) == stream_of(np.array([1, 2, 3]), 0)  # type: ignore[arg-type]
    different = [([1, 2, 3], 0), ([1, 2, 3], 1), ([1, 2, 3], -1), ([1, 2], 0), ([3, 2, 1], 0), ([1, 2, 4], 0), ([], 0)]
    different += [([0, 1, 2, 3], 0), ([1, 2, 3, 0], 0), ([0], 0), ([0, 0], 0), ([], 1), ([1], 0)]
    found = [stream_of(tokens, sample) for tokens, sample in different]
    assert len(set(found)) == len(different)
    assert all(-(2**63) <= s < 2**63 for s in found)
    assert stream_of([1], 2**64 + 5) == stream_of([1], 5)  # seeds beyond 64 bits are cut, not refused


# ---- fairness ---------------------------------------------------------------------------------

C, V, N = 24, 6, 20_000


def keys_of(seed: int, layer: int, head: int, number: int, streams: Tensor | None = None) -> Tensor:
    """int32 [N, C]: one head's keys in one round of N requests."""
    streams = torch.arange(N) if streams is None else streams
    words = round_words(seed, streams, ids(layer), ids(head), torch.full_like(streams, number))
    return rank_keys(words, torch.arange(C, dtype=torch.int32))[:, 0, 0]


def biased(keys: Tensor, strength: float) -> Tensor:
    """A plausible mistake: few bits of the key, and a small preference for old candidates."""
    return ((keys >> 8).double() / 2**23 + strength * torch.arange(C) / C).float()


def inclusion_p(keys: Tensor) -> float:
    return uniform_inclusion(victims_of(keys, V).sum(0), len(keys), V)


@pytest.mark.parametrize("seed", range(4))
def test_victims_are_uniform(seed: int) -> None:
    """Each candidate goes with probability r / C: over requests, and over the heads of one round."""
    assert inclusion_p(keys_of(seed, 0, 0, 0)) > P_MIN
    assert inclusion_p(keys_of(seed, 3, 1, 17)) > P_MIN
    words = round_words(seed, ids(77), torch.arange(40), torch.arange(500), ids(3))
    assert inclusion_p(rank_keys(words, torch.arange(C, dtype=torch.int32)).view(-1, C)) > P_MIN


def test_the_same_test_rejects_a_biased_sampler() -> None:
    """A test that accepts everything proves nothing: 3% of a key's range as bias is found."""
    assert inclusion_p(biased(keys_of(0, 0, 0, 0), 0.06)) < P_MIN
    assert inclusion_p(biased(keys_of(0, 0, 0, 0), 0.0)) > P_MIN  # it is the bias that is found


def test_the_correction_for_fixed_sizes_is_right() -> None:
    """p-values of fair draws are themselves uniform; without the division by 1 - p they would pile up at 1."""
    p = [inclusion_p(keys_of(seed, 1, 2, 3, torch.arange(2000))) for seed in range(200)]
    assert stats.kstest(p, "uniform").pvalue > P_MIN


OTHERS = {
    "next head": (0, 0, 1, 0),
    "head far away": (0, 0, 32, 0),
    "next layer": (0, 1, 0, 0),
    "layer and head swapped": (0, 5, 3, 0),
    "next round": (0, 0, 0, 1),
    "round after next": (0, 0, 0, 2),
    "next seed": (1, 0, 0, 0),
    "opposite seed": (-1, 0, 0, 0),
    "seed far away": (2**32, 0, 0, 0),
}


@pytest.mark.parametrize("other", OTHERS)
def test_draws_are_independent_in_pairs(other: str) -> None:
    """Heads, layers, rounds and seeds next to one another share nothing, not even up to a shift."""
    first = (0, 3, 5, 0) if "swapped" in other else (0, 0, 0, 0)
    a, b = victims_of(keys_of(*first), V), victims_of(keys_of(*OTHERS[other]), V)
    assert overlap_is_hypergeometric(a, b) > P_MIN
    assert joint_inclusion(a, b) > P_MIN


def test_neighbouring_streams_are_independent() -> None:
    """Streams are hashes, but a caller may number its rows."""
    a = victims_of(keys_of(0, 0, 0, 0, torch.arange(0, 2 * N, 2)), V)
    b = victims_of(keys_of(0, 0, 0, 0, torch.arange(1, 2 * N, 2)), V)
    assert overlap_is_hypergeometric(a, b) > P_MIN
    assert joint_inclusion(a, b) > P_MIN


def test_pairs_within_a_draw_go_together_as_they_should() -> None:
    """Two candidates are victims together r (r - 1) / (C (C - 1)) of the time, neighbours as well as others."""
    held = victims_of(keys_of(0, 0, 0, 0), V).astype(float)
    together = (held.T @ held)[np.triu_indices(C, 1)]
    p = V * (V - 1) / (C * (C - 1))
    tails = np.minimum(stats.binom.sf(together - 1, N, p), stats.binom.cdf(together, N, p))
    assert 2 * len(together) * tails.min() > P_MIN


def test_the_pair_tests_reject_dependent_draws() -> None:
    """Shared draws in 5% of the cases, and a rotated copy of the same draw, are both found."""
    a, b = victims_of(keys_of(0, 0, 0, 0), V), victims_of(keys_of(0, 0, 1, 0), V)
    leaky = b.copy()
    leaky[::20] = a[::20]
    assert overlap_is_hypergeometric(a, leaky) < P_MIN
    assert joint_inclusion(a, leaky) < P_MIN
    assert joint_inclusion(a, np.roll(a, 7, axis=1)) < P_MIN


def test_survival_is_geometric() -> None:
    """After n rounds a head still holds a position with probability q^n, q = 1 - r / (K - P), for w = r."""
    K, r, P, heads = 20, 4, 4, 8000
    q = 1 - r / (K - P)
    budget, keep_prompt = Budget(K, r), Protection.parse("prompt")
    for n in (1, 2, 3, 5, 8):
        kept = simulate(RandomAttention(), budget, keep_prompt, P, n, stream=9, L=2, H=heads // 2, seed=n).view(
            heads, K
        )
        for batch in range(n):  # the tokens that became candidates in round `batch` saw n - batch rounds
            low, high = (P, K) if batch == 0 else (K + r * (batch - 1), K + r * batch)
            held = torch.stack([(kept == p).any(-1) for p in range(low, high)], -1).double()  # [heads, positions]
            share = q ** (n - batch)
            error = held.mean(-1).std() / heads**0.5
            assert abs(float(held.mean()) - share) <= 4.5 * float(error) + 1e-12
            each = np.sqrt(share * (1 - share) / heads)
            assert float((held.mean(0) - share).abs().max()) < 5 * each
