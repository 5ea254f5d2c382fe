"""Regressions of what lies around the cache: policies, sample numbers, the engine door, the command line."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvkeep
from kvkeep import Settings
from kvkeep.engine import Sampling
from kvkeep.hf import load as load_module
from kvkeep.hf.engine import HFEngine
from kvkeep.hf.model import Unsupported
from kvkeep.policies import Policy, RandomAttention, policies, register
from kvkeep.signals import RoundView
from masked import force
from models import generate, prompt, step, tiny
from test_cli import kvkeep as command
from test_hf_forwards import hooks
from test_load import make_tokenizer
from test_load import tiny as tiny_folder  # noqa: F401 - a fixture

K, R = 24, 4
RANDOM = Settings("random", budget=K, buffer=R)


def evict(model: Any, policy: Any = "random", **values: Any) -> Any:
    return kvkeep.evict(model, policy, **{"budget": K, "buffer": R, "seed": 7, **values})


def ids(n: int, seed: int = 0) -> list[int]:
    return [int(i) for i in prompt(n, seed).flatten()]


# ---- policies as objects ------------------------------------------------------------------------


class Mine(RandomAttention):
    """Evicts the lowest ranks of every head."""

    name: ClassVar[str] = "mine"

    def draw_keys(self, view: RoundView) -> Tensor:
        ranks = torch.arange(view.candidates, dtype=torch.int32)
        return ranks.expand(len(view.streams), len(view.layers), len(view.heads), -1)


class Impostor(Mine):
    """Calls itself like kvkeep's own."""

    name: ClassVar[str] = "random"


def test_a_policy_object_is_used_as_it_is() -> None:
    """A name that is not known yet is made known, so that the settings still go through JSON."""
    model, tokens = tiny("llama"), prompt(60, seed=4)
    assert "mine" not in policies()
    with evict(model, Mine()) as cache:
        force(model, cache, tokens, 11)
        kept = cache.kept_positions()
        assert cache.stats()["policy"] == "mine"
        assert type(cache.policy) is Mine
        assert Settings.from_json(cache.settings.to_json()) == cache.settings
    assert bool((kept == kept[:1, :1]).all()), "every head evicts the same ranks"
    with evict(model) as cache:
        force(model, cache, tokens, 11)
        assert not torch.equal(cache.kept_positions(), kept)
    with evict(model, "mine", draw="layer") as cache:  # by its name from now on, with the options it inherited
        assert cache.policy == Mine(draw="layer")
    register(Mine)  # again: nothing changes
    assert policies()["mine"] is Mine


def test_a_policy_object_with_a_name_that_is_taken() -> None:
    """kvkeep's own was used in its place, silently."""
    with (
        pytest.raises(ValueError, match="Impostor is called 'random' like RandomAttention"),
        evict(tiny("llama"), Impostor()),
    ):
        pass
    with pytest.raises(ValueError, match="'random'"):
        register(Impostor)
    assert policies()["random"] is RandomAttention


# ---- scores -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wrong(Policy):
    """Scores with a fault."""

    fault: str = "nan"
    name: ClassVar[str] = "wrong"

    def score(self, view: RoundView) -> Tensor:
        R_, L, H, C = len(view.streams), len(view.layers), len(view.heads), view.candidates
        scores = torch.arange(C, dtype=torch.float32).expand(R_, L, H, C).clone()
        if self.fault == "nan":
            scores[-1, -1, -1, C // 2] = float("nan")
        narrow = {"candidates": scores[..., 1:], "layers": scores[:, 1:], "heads": scores.repeat(1, 1, 2, 1)}
        narrow |= {"rows": scores.repeat(2, 1, 1, 1), "axes": scores[0]}
        return narrow.get(self.fault, scores)


@pytest.mark.parametrize("fault", ["none", "nan", "candidates", "layers", "heads", "rows", "axes"])
def test_scores_that_make_no_sense(fault: str) -> None:
    """Refused with the policy's name where they come up; NaN would have been kept or evicted by chance."""
    with evict(tiny("llama"), Wrong(fault)) as cache:
        if fault == "none":
            generate(tiny("llama"), cache, prompt(11), 40)
            return
        says = "returned NaN scores" if fault == "nan" else r"returned keys of shape .*, expected \[\d+, 3, 2, 13\]"
        with pytest.raises(ValueError, match=f"policy 'wrong' {says}"):
            generate(tiny("llama"), cache, prompt(11), 40)
        assert cache.stats()["rounds"] == [0]


def test_a_signal_nobody_knows() -> None:
    """Refused when the cache is made, with the policy's name and what there is."""

    class Clairvoyant(Mine):
        name: ClassVar[str] = "clairvoyant"
        signals: ClassVar[frozenset[str]] = frozenset({"positions", "future"})

    model = tiny("llama")
    with (
        pytest.raises(Unsupported, match="'clairvoyant' asks for future; known are attention, digest, entropy"),
        evict(model, Clairvoyant()),
    ):
        pass
    assert hooks(model) == 0


# ---- sample numbers -----------------------------------------------------------------------------


def test_sample_numbers_can_change_between_requests() -> None:
    """Samples of one prompt drawn one after the other with one cache must not all draw alike."""
    model, tokens = tiny("llama"), prompt(60, seed=4)
    with evict(model, samples=[1]) as one:
        force(model, one, tokens, 11)
        expected = one.kept_positions()
    with evict(model) as cache:
        kept = []
        for samples in (None, None, [1], None, [0]):
            cache.reset() if samples is None else cache.reset(samples=samples)
            force(model, cache, tokens, 11)
            kept.append(cache.kept_positions())
    assert torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[0], kept[2])
    assert torch.equal(kept[2], expected)
    assert torch.equal(kept[3], kept[2]), "numbers stay until there are new ones"
    assert torch.equal(kept[4], kept[0])
    with evict(model) as cache:
        cache.reset(samples=[0, 1])
        with pytest.raises(ValueError, match="samples has 2 numbers for a batch of 1"):
            step(model, cache, prompt(11))


def test_numbered_rows_are_not_repeated() -> None:
    """Their copies would have the same number, so the same draws."""
    model = tiny("llama")
    with evict(model, samples=[4]) as cache:
        step(model, cache, prompt(11))
        with pytest.raises(Unsupported, match="samples="):
            cache.batch_repeat_interleave(2)
        cache.batch_repeat_interleave(1)
        step(model, cache, prompt(1))


def test_repeated_rows_draw_by_themselves() -> None:
    """Without numbers, copies of a row are samples 0 and 1, as if the prompt had been fed twice."""
    model, tokens = tiny("llama"), prompt(60, seed=4)
    with evict(model) as twice, evict(model) as cache:
        force(model, twice, tokens.expand(2, -1), 11)
        step(model, cache, tokens[:, :11])
        cache.batch_repeat_interleave(2)
        for t in range(11, 60):
            step(model, cache, tokens[:, t : t + 1].expand(2, -1))
        for row in range(2):
            assert torch.equal(cache.kept_positions(row), twice.kept_positions(row))


def test_rows_that_are_selected_keep_their_draws() -> None:
    """The second of two equal prompts is sample 1, also when the first has gone."""
    model, tokens = tiny("llama"), prompt(60, seed=4)
    with evict(model, samples=[1]) as one:
        force(model, one, tokens, 11)
        expected = one.kept_positions()
    with evict(model) as cache:
        step(model, cache, tokens[:, :11].expand(2, -1))
        cache.batch_select_indices(torch.tensor([1]))
        for t in range(11, 60):
            step(model, cache, tokens[:, t : t + 1])
        assert torch.equal(cache.kept_positions(), expected)


# ---- the engine door ----------------------------------------------------------------------------


def engine(settings: Settings = RANDOM, model: PreTrainedModel | None = None) -> HFEngine:
    return HFEngine(tiny("llama") if model is None else model, make_tokenizer(), settings)


def test_defaults_of_the_model_do_not_reach_generate() -> None:
    """What a checkpoint's generation_config asks for would bend a comparison of policies."""
    model = copy.deepcopy(tiny("llama"))
    own = model.generation_config
    asked = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "num_beams": 3}
    for name, value in asked.items():
        setattr(own, name, value)
    before = own.to_dict()
    prompts, sampling = [ids(13), ids(6, seed=1)], Sampling(max_new_tokens=40, ignore_end=True)
    expected = [s.tokens for s in engine().generate(prompts, [0, 0], sampling)]
    assert len(set(expected[0])) < 40, "no repetition: the test tests nothing"
    assert [s.tokens for s in engine(model=model).generate(prompts, [0, 0], sampling)] == expected
    assert model.generation_config is own
    assert own.to_dict() == before

    def fail(cache: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine(model=model).generate(prompts, [0, 0], sampling, on_token=fail)
    assert model.generation_config is own
    assert own.to_dict() == before
    assert hooks(model) == 0


def test_sampled_tokens_follow_the_sample_number() -> None:
    """Under full nothing else tells samples apart: without it, separate calls gave one trace many times."""
    sampling = Sampling(max_new_tokens=30, temperature=1.0, ignore_end=True, seed=3)
    zero, again, one = (engine(Settings("full")).generate([ids(8)], [n], sampling)[0].tokens for n in (0, 0, 1))
    assert zero == again != one


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_global_generator_is_left_alone(temperature: float) -> None:
    torch.manual_seed(1234)
    before = torch.get_rng_state()
    sampling = Sampling(max_new_tokens=5, temperature=temperature, seed=3)
    engine().generate([ids(8)], [0], sampling)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.initial_seed() == 1234


def test_forcing_takes_sample_numbers() -> None:
    """The trace of sample 3 must be scored under the draws that made it."""
    prompts, traces = [ids(8), ids(8)], [ids(60, seed=1)] * 2
    plain, other = (
        [forced.logprobs for forced in engine().force(prompts, traces, samples=numbers)] for numbers in (None, [3, 0])
    )
    assert torch.equal(plain[0], plain[1])
    assert torch.equal(plain[0], other[1])
    assert torch.equal(plain[0][:20], other[0][:20])  # before the first round
    assert not torch.allclose(plain[0], other[0], atol=1e-3)
    with pytest.raises(ValueError):
        engine().force(prompts, traces, samples=[3])


# ---- settings and the command line --------------------------------------------------------------


def test_a_misspelt_setting_is_named() -> None:
    """It went to the policy as an option, whose refusal named only the policy's options."""
    with (
        pytest.raises(ValueError, match="no setting 'bufer': did you mean buffer"),
        kvkeep.evict(tiny("llama"), budget=K, bufer=4),
    ):
        pass


@pytest.mark.parametrize("seed", [2**64, 2**63, -(2**63) - 1])
def test_a_seed_that_is_too_large(seed: int) -> None:
    """Refused with the settings, not by numpy in the first round."""
    with pytest.raises(ValueError, match="seed must be a whole number of 64 bits"):
        Settings("random", budget=K, buffer=R, seed=seed)


@pytest.mark.parametrize(("option", "text"), [("--model", "[/x]"), ("--protect", "[/b]"), ("--policy", "[red]x")])
def test_mistakes_that_look_like_markup(
    option: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """rich read square brackets as markup: a traceback for closing tags, a gap for opening ones."""
    assert command(monkeypatch, "generate", "x", option, text) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert text in said
    assert "Traceback" not in said


@pytest.mark.parametrize("words", [["generate", "x", "--stats-json"], ["policies", "--json"], ["demo", "--json"]])
def test_a_result_that_cannot_be_written_is_refused_first(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a model is loaded: the work of hours must not be lost to a misspelt path."""

    def loaded(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(load_module, "load", loaded)
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "stats.json", tmp_path / "file" / "deep" / "stats.json", tmp_path):
        assert command(monkeypatch, *words, str(path)) == 2
        said = capsys.readouterr()
        assert f"cannot write {path}" in said.err
        assert said.out == ""


BROKEN = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from kvkeep.cli import main
import kvkeep
from models import generate, prompt, tiny

def run(*words):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as ended:
        return ended.code or 0

folder = sys.argv[1]
small = ("--budget", "16", "--buffer", "4", "--max-new-tokens", "40", "--no-chat")
assert run("generate", "the cat sat", "--model", folder, "--policy", "random", *small) == 0
with kvkeep.evict(tiny("llama"), budget=24, buffer=4) as cache:
    generate(tiny("llama"), cache, prompt(9), 30)
    assert cache.stats()["rounds"] == [3]
for words in (["policies"], ["generate", "x", "--policy", "others"]):
    print("ASKED", file=sys.stderr)
    assert run(*words) == 2
"""


@pytest.mark.slow
def test_somebody_elses_broken_policy(tiny_folder: Path, tmp_path: Path) -> None:  # noqa: F811
    """kvkeep's own methods go on; what needs the others says which package is broken."""
    site = tmp_path / "site"
    info = site / "broken_policy-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "broken_policy.py").write_text("raise ImportError('libsomething.so is missing')\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-policy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvkeep.policies]\nbroken = broken_policy:Broken\n")
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", BROKEN, str(Path(__file__).parent), str(tiny_folder)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for said in done.stderr.split("ASKED")[1:]:
        assert "error: the policy 'broken' (broken_policy:Broken) cannot be loaded: libsomething.so" in said
        assert "Traceback" not in said
