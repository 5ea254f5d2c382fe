"""The Engine door on transformers: batches, ends, teacher forcing."""

from __future__ import annotations

import pytest
import torch

from kvkeep import Settings
from kvkeep.engine import Engine, Sample, Sampling
from kvkeep.hf.cache import EvictCache
from kvkeep.hf.engine import HFEngine
from models import prompt, tiny
from test_load import WORDS, make_tokenizer

RANDOM = Settings("random", budget=24, buffer=4)


def engine(settings: Settings = RANDOM) -> HFEngine:
    return HFEngine(tiny("llama"), make_tokenizer(), settings)


def ids(n: int, seed: int = 0) -> list[int]:
    return [int(i) for i in prompt(n, seed).flatten()]


def test_it_is_an_engine() -> None:
    assert isinstance(engine(), Engine)


def test_a_batch_gives_what_each_request_gives_alone() -> None:
    prompts = [ids(13), ids(6, seed=1), ids(9, seed=2)]
    sampling = Sampling(max_new_tokens=50, ignore_end=True)
    together = engine().generate(prompts, [0, 0, 0], sampling)
    for i, one in enumerate(prompts):
        alone = engine().generate([one], [0], sampling)[0]
        assert together[i].tokens == alone.tokens
        assert len(alone.tokens) == 50
        assert together[i].stats["rounds"] == alone.stats["rounds"] > 5


def test_sample_numbers_change_the_draws() -> None:
    first, again, other = (
        engine().generate([ids(8)], [number], Sampling(max_new_tokens=80, ignore_end=True))[0] for number in (0, 0, 1)
    )
    assert first.tokens == again.tokens != other.tokens


def test_sampling_is_reproducible_and_leaves_the_global_generator_alone() -> None:
    sampling = Sampling(max_new_tokens=30, temperature=1.0, top_p=0.9, ignore_end=True, seed=3)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    runs = [engine().generate([ids(8)], [0], sampling)[0].tokens for _ in range(2)]
    assert torch.equal(before, torch.get_rng_state())
    assert runs[0] == runs[1]
    assert runs[0] != engine().generate([ids(8)], [0], Sampling(30, 1.0, 0.9, True, seed=4))[0].tokens


def test_prompts_do_not_share_their_sampling_noise() -> None:
    """At a temperature where the model hardly matters, two prompts with one sample number get other tokens."""
    sampling = Sampling(max_new_tokens=20, temperature=1000.0, ignore_end=True)
    first, second = (engine().generate([ids(8, seed)], [0], sampling)[0].tokens for seed in (0, 1))
    assert sum(a == b for a, b in zip(first, second, strict=True)) <= 5


def test_an_end_token_ends_its_own_row_only() -> None:
    """Rows that end are padded by generate; their tokens stop at the end token."""
    free = engine().generate([ids(13), ids(6, 1)], [0, 0], Sampling(max_new_tokens=40, ignore_end=True))
    made = HFEngine(tiny("llama"), make_tokenizer(), RANDOM)
    end = free[0].tokens[10]
    made._end_tokens = lambda: [end]  # type: ignore[method-assign]
    ended = made.generate([ids(13), ids(6, 1)], [0, 0], Sampling(max_new_tokens=40))
    for whole, cut in zip(free, ended, strict=True):
        stop = whole.tokens.index(end) + 1 if end in whole.tokens else len(whole.tokens)
        assert cut.tokens == whole.tokens[:stop]


def test_forcing_equals_generating() -> None:
    """Greedy tokens, forced, have the highest log-probability at every step, rounds included."""
    sample = engine().generate([ids(8)], [0], Sampling(max_new_tokens=60, ignore_end=True))[0]
    forced = engine().force([ids(8)], [sample.tokens])[0]
    assert forced.logprobs.shape == (60,)
    assert forced.logprobs.dtype == torch.float32
    assert bool(forced.greedy.all())
    step_by_step = _one_token_at_a_time(ids(8), sample.tokens)
    assert torch.allclose(forced.logprobs, step_by_step, atol=1e-5)
    full = engine(Settings("full")).force([ids(8)], [sample.tokens])[0]
    assert not torch.allclose(forced.logprobs, full.logprobs, atol=1e-3)


def _one_token_at_a_time(start: list[int], trace: list[int]) -> torch.Tensor:
    model = tiny("llama")
    cache = EvictCache(model, RANDOM, [0])
    found, feed = [], torch.tensor([start])
    with torch.no_grad():
        for token in trace:
            logits = model(feed, past_key_values=cache, use_cache=True).logits[0, -1]
            found.append(logits.log_softmax(-1)[token])
            feed = torch.tensor([[token]])
    cache.close()
    return torch.stack(found)


def test_tokens_are_watched_one_by_one() -> None:
    seen: list[int] = []
    engine().generate([ids(8)], [0], Sampling(20, ignore_end=True), on_token=lambda c: seen.append(c.get_seq_length()))
    assert seen == list(range(8, 28))  # the newest token is not cached yet


@pytest.mark.parametrize(
    ("prompts", "samples", "says"),
    [([], [], "at least one prompt"), ([[]], [0], "at least one token"), ([[1], [2]], [0], "as many sample numbers")],
)
def test_bad_requests(prompts: list[list[int]], samples: list[int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        engine().generate(prompts, samples, Sampling())


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    ],
)
def test_bad_sampling(values: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Sampling(**values)  # type: ignore[arg-type]


def test_text_is_decoded() -> None:
    sample = engine().generate([ids(8)], [0], Sampling(max_new_tokens=5, ignore_end=True))[0]
    assert isinstance(sample, Sample)
    known = [WORDS[t] for t in sample.tokens if t < len(WORDS) and t > 1]
    assert sample.text.split() == known
