"""The settings of the vLLM engine: what is read, what is refused and with which words. Needs no vLLM."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from kvkeep.vllm import KEY, Refused, Serving
from kvkeep.vllm.config import runnable


def parse(**values: Any) -> Serving:
    return Serving.parse({"budget": 2048, **values})


def test_defaults() -> None:
    serving = Serving.parse({"budget": 2048})
    assert (serving.policy.name, serving.admission, serving.moving, serving.one_by_one) == (
        "random", "grow", "in-place", False,
    )  # fmt: skip
    assert (serving.settings.buffer, serving.settings.scope, serving.settings.protect_text) == (64, "grow", "prompt")
    assert serving.slots == 2112
    assert serving.shares_prompts
    assert not serving.whole_blocks


def test_options_of_the_policy_and_of_the_engine() -> None:
    serving = parse(policy="random", draw="model", unit=64, seed=-5, admission="reserve", moving="gather")
    assert serving.settings.options == {"draw": "model", "unit": 64}
    assert (serving.settings.seed, serving.admission, serving.moving) == (-5, "reserve", "gather")
    assert serving.whole_blocks
    assert not parse(draw="model").whole_blocks
    assert not parse(unit=4).whole_blocks


@pytest.mark.parametrize(
    ("protect", "shares"),
    [("prompt", True), ("prompt:0.5", False), ("none", False), ("sinks:4", False), ("prompt+sinks:4", True)],
)
def test_prompts_are_shared_only_if_no_round_writes_them(protect: str, shares: bool) -> None:
    assert parse(protect=protect).shares_prompts is shares


@pytest.mark.parametrize(
    "values",
    [
        {"budget": 2048},
        {"budget": 100, "buffer": 7, "draw": "layer", "seed": -(2**63), "admission": "reserve", "one_by_one": True},
        {"policy": "streaming", "budget": 512, "protect": "sinks:8", "window": 0, "scope": "trace", "align": 16},
    ],
)
def test_settings_survive_the_trip_between_processes(values: dict[str, Any]) -> None:
    serving = Serving.parse(values)
    text = serving.to_json()
    assert Serving.from_json(text) == serving
    assert Serving.from_json(text).to_json() == text
    assert "\n" not in text


@pytest.mark.parametrize("config", [None, {}, {"other": {"budget": 8}}, "text", 7])
def test_not_asked_for(config: Any) -> None:
    assert Serving.of(config) is None


def test_asked_to_evict_nothing() -> None:
    assert Serving.of({KEY: {"policy": "full"}}) is None


def test_asked_for() -> None:
    found = Serving.of({"other": 1, KEY: {"budget": 2048}})
    assert found is not None
    assert found == Serving.parse({"budget": 2048})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "scope": ({"scope": "total"}, r'scope="total" refuses prompts .* use scope="grow" .* or scope="trace"'),
    "scored": ({"policy": "snapkv"}, r"policy 'snapkv' .* use one of .*random.*, or run it with transformers"),
    "mixed": ({"policy": "vase"}, r"policy 'vase' .* use one of "),
    "unit": ({"unit": 4, "protect": "none"}, r"unit=4 cannot cut a prompt .* use protect='prompt' or unit=1"),
    "unit-half": ({"unit": 4, "protect": "prompt:0.5"}, r"unit=4 cannot cut .* use protect='prompt' or unit=1"),
    "prefill": (
        {"prefill_keep": 0.5, "protect": "none"},
        r"prefill_keep compresses a context once, which the vLLM engine does not do: leave it out",
    ),
    "growth": ({"growth": 4.0}, r"growth=4\.0 lets the budget grow without end.* use growth=None"),
    "pins": ({"protect": "prompt+pin:70-80"}, r"protect='prompt\+pin:70-80' pins .* use prompt, prompt:0\.5, sinks:4"),
    "positions": (
        {"track_positions": True},
        r"track_positions is not kept.*EvictCache\.kept_positions.*leave it out",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    values, words = REFUSED[name]
    with pytest.raises(Refused, match=words):
        parse(**values)


WRONG: dict[str, tuple[Any, str]] = {
    "list": ([], r'additional_config\["kvkeep"\] must be an object such as \{"policy": "random", "budget": 2048\}'),
    "text": ("random", r"must be an object .* got 'random'"),
    "policy": ({"policy": 7, "budget": 64}, r"policy must be the short name of a method, got 7"),
    "no-such-policy": ({"policy": "randum", "budget": 64}, r"unknown policy 'randum': did you mean random\?"),
    "no-budget": ({"policy": "random"}, r"'random' needs a budget"),
    "near": ({"budgt": 2048}, r"there is no setting 'budgt': did you mean budget\?"),
    "near-buffer": ({"budget": 2048, "bufer": 8}, r"there is no setting 'bufer': did you mean buffer\?"),
    "unknown": ({"budget": 2048, "colour": 1}, r"'random' has no option 'colour': it takes draw, groups, unit"),
    "near-admission": ({"budget": 64, "admision": "grow"}, r"there is no setting 'admision': did you mean admission\?"),
    "near-moving": ({"budget": 2048, "movin": "gather"}, r"there is no setting 'movin': did you mean moving\?"),
    "admission": ({"budget": 2048, "admission": "grab"}, r"admission must be one of grow, reserve, got 'grab'"),
    "admission-type": ({"budget": 2048, "admission": True}, r"admission must be one of grow, reserve, got True"),
    "moving": ({"budget": 2048, "moving": "compact"}, r"moving must be one of in-place, gather, got 'compact'"),
    "one-by-one": ({"budget": 2048, "one_by_one": 1}, r"one_by_one must be true or false, got 1"),
    "one-by-one-text": ({"budget": 2048, "one_by_one": "false"}, r"one_by_one must be true or false, got 'false'"),
    "budget-type": ({"budget": "2048"}, r"total must be a whole number of at least 1, got '2048'"),
    "budget-small": ({"budget": 64, "buffer": 64}, r"budget 64 is not larger than the buffer 64"),
    "seed": ({"budget": 2048, "seed": 1.5}, r"seed must be a whole number of 64 bits, got 1\.5"),
    "draw": ({"budget": 2048, "draw": "block"}, r"draw must be one of head, layer, model, got 'block'"),
    "unit": ({"budget": 2048, "unit": 5}, r"unit=5 does not divide the buffer of 64"),
    "protect": ({"budget": 2048, "protect": "promt"}, r"protection 'promt' is not understood; use prompt"),
    "window": ({"budget": 2048, "window": 4096}, r"budget 2048 is smaller than the window 4096"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name: str) -> None:
    values, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        Serving.parse(values)


def test_every_policy_that_is_listed_runs_here() -> None:
    names = runnable()
    assert {"full", "random", "recency", "streaming"} <= set(names)
    for name in names:
        Serving.parse({"policy": name, "budget": 2048})


@pytest.mark.parametrize(
    ("values", "size", "words"),
    [
        ({"unit": 64}, 128, r"unit=64 .*blocks of 128 slots do not divide it: pass --block-size 64"),
        ({"unit": 64}, 48, r"pass --block-size 64"),
        ({"unit": 16}, 128, r"unit=16 .* use a multiple of 32 as the unit"),
    ],
)
def test_whole_blocks_need_blocks_that_divide_the_unit(values: dict[str, Any], size: int, words: str) -> None:
    with pytest.raises(Refused, match=words):
        parse(draw="model", **values).check_block_size(size, 32)


@pytest.mark.parametrize(("values", "size"), [({"draw": "model", "unit": 64}, 32), ({"unit": 4}, 128), ({}, 48)])
def test_other_block_sizes_fit(values: dict[str, Any], size: int) -> None:
    parse(**values).check_block_size(size, 16)


@pytest.mark.parametrize(
    ("values", "supported", "best"),
    [
        ({}, 16, 64),
        ({"buffer": 128}, 16, 128),
        ({"buffer": 128}, 32, 128),
        ({"buffer": 96}, 32, 32),  # gcd(1952, 96) = 32
        ({"buffer": 24}, 16, 16),  # none fits: the smallest wastes least
        ({"budget": 4096, "buffer": 2048}, 16, 1024),
        ({"buffer": 128, "draw": "model", "unit": 64}, 16, 64),
        ({"buffer": 128, "draw": "head", "unit": 64}, 16, 128),  # entries move, whatever the blocks
    ],
)
def test_best_block_size(values: dict[str, Any], supported: int, best: int) -> None:
    serving = parse(**values)
    assert serving.best_block_size(supported) == best
    serving.check_block_size(best, supported)


def test_reading_settings_imports_no_vllm() -> None:
    program = (
        "import sys; from kvkeep.vllm import Serving; Serving.parse({'budget': 2048}).to_json(); "
        "import kvkeep.vllm.timeline, kvkeep.vllm.steps, kvkeep.vllm.rounds, kvkeep.vllm.requests; "
        "sys.exit(any(n == 'vllm' or n.startswith('vllm.') for n in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == 0
