"""The content-free rules beside the die, the registry, and the settings that name them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch

from kvkeep.budget import Budget
from kvkeep.policies import Full, Policy, RandomAttention, Recency, StreamingLLM, make_policy, policies
from kvkeep.protection import Protection
from kvkeep.settings import Settings
from kvkeep.signals import RoundView
from reference import Slots

# K, r, w, prompt: pools that are a multiple of r, and pools that are not; over-long and empty prompts
SHAPES = [
    (16, 4, 4, 4),
    (17, 4, 4, 4),
    (18, 4, 4, 3),
    (19, 5, 5, 6),
    (16, 5, 2, 3),
    (16, 3, 0, 5),
    (16, 3, 7, 5),
    (16, 15, 1, 0),
    (16, 4, 4, 12),
    (16, 4, 4, 40),
    (9, 1, 1, 4),
]


@pytest.mark.parametrize(("K", "r", "w", "prompt"), SHAPES)
@pytest.mark.parametrize("policy", [Recency(), StreamingLLM()])
def test_recency_keeps_the_prefix_and_the_newest(policy: Policy, K: int, r: int, w: int, prompt: int) -> None:
    """At every token, not only after rounds: the prefix and one unbroken run up to the newest."""
    text = "prompt" if policy.name == "recency" and prompt + w <= K else policy.published_protection
    slots = Slots(policy, Budget(K, r, w), Protection.parse(text), [prompt], [0], 2, 2)
    row = slots.rows[0]
    for _ in range(6 * r + 3 * K):
        slots.trace(1)
        newest = row.cached - row.protected
        expected = [*range(row.protected), *range(row.seen - newest, row.seen)]
        assert all(sorted(head) == expected for head in slots.kept().flatten(0, 1).tolist())
        if row.rounds:
            assert K < row.cached <= K + r  # rounds run when they must, and free exactly what they should


def test_recency_drops_the_oldest_of_a_prompt_it_does_not_protect() -> None:
    slots = Slots(Recency(), Budget(8, 2), Protection.parse("none"), [8], [0])
    slots.trace(3)
    assert sorted(slots.kept().flatten().tolist()) == list(range(2, 11))


def test_streaming_keeps_four_sinks_of_a_long_prompt() -> None:
    """The paper's protection is the default, so a prompt longer than K is no error."""
    settings = Settings(policy="streaming", budget=16, buffer=4)
    slots = Slots(settings.make_policy(), settings.make_budget(), settings.protection, [100], [0])
    slots.rounds(1)
    assert sorted(slots.kept().flatten().tolist()) == [0, 1, 2, 3, *range(88, 100)]


@pytest.mark.parametrize("text", ["prompt", "prompt:0.5", "sinks:4", "pin:10-20,40-48", "none", "sinks:2+pin:3-5"])
def test_protection_prefix(text: str) -> None:
    """P of a 9-token prompt, worked out by hand; pins lie beyond it or in it."""
    expected = {"prompt": 9, "prompt:0.5": 5, "sinks:4": 4, "pin:10-20,40-48": 0, "none": 0, "sinks:2+pin:3-5": 2}
    pinned = {"pin:10-20,40-48": 18, "sinks:2+pin:3-5": 2}
    protection = Protection.parse(text)
    assert protection.prefix(9) == expected[text]
    assert protection.pinned(protection.prefix(9)) == pinned.get(text, 0)


def test_pins_that_overlap_count_once() -> None:
    protection = Protection.parse("pin:10-20,15-25,18-19,0-4")
    assert protection.pinned(0) == 4 + 15
    assert protection.pinned(2) == 2 + 15
    assert protection.pinned(22) == 3
    assert Protection.parse("sinks:4").prefix(3) == 3  # no more sinks than tokens
    assert Protection.parse("sinks:4+prompt:0.5").prefix(20) == 10


@pytest.mark.parametrize(
    "text", ["promt", "prompt:2", "prompt:-0.1", "prompt:x", "prompt:nan", "sinks", "sinks:-1", "sinks:x", "pin:5-5",
             "pin:7", "pin:9-3", "none:1", ""]
)  # fmt: skip
def test_protection_refuses_what_it_cannot_read(text: str) -> None:
    with pytest.raises(ValueError, match="protection") as caught:
        Protection.parse(text)
    assert repr(text) in str(caught.value)


# ---- registry ---------------------------------------------------------------------------------


def test_short_names() -> None:
    for name, policy in (
        ("full", Full),
        ("random", RandomAttention),
        ("recency", Recency),
        ("streaming", StreamingLLM),
    ):
        assert policies()[name] is policy
        assert type(make_policy(name)) is policy
        assert policy.name == name
        assert policy.rule
        assert policy.paper
    assert make_policy("random", {"draw": "layer", "unit": 2}) == RandomAttention("layer", unit=2)


def test_unknown_names_suggest_near_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown policy 'randon': did you mean random"):
        make_policy("randon")
    with pytest.raises(ValueError, match="did you mean streaming"):
        make_policy("streamingllm")
    with pytest.raises(ValueError, match=r"known are .*full.*random") as caught:
        make_policy("xyzzy")
    assert "did you mean" not in str(caught.value)


def test_unknown_options_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match="policy 'random' has no option 'drew': it takes draw, groups, unit"):
        make_policy("random", {"drew": "head"})
    with pytest.raises(ValueError, match="'recency' has no option 'unit': it takes none"):
        make_policy("recency", {"unit": 2})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"draw": "heads"}, "head, layer, model, got 'heads'"),
        ({"groups": 0}, "groups must be a whole number of at least 1, got 0"),
        ({"groups": 2, "draw": "layer"}, "got draw='layer'"),
        ({"unit": 0}, "unit must be a whole number of at least 1, got 0"),
        ({"unit": "2"}, "unit must be a whole number of at least 1, got .2."),
    ],
)
def test_bad_options_of_random(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_policy("random", options)


def test_groups_are_checked_against_the_model() -> None:
    RandomAttention(groups=4).check(8, Budget(16, 4))
    with pytest.raises(ValueError, match="groups=3 does not divide the model's 8 KV heads"):
        RandomAttention(groups=3).check(8, Budget(16, 4))


# ---- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        Settings(budget=2048),
        Settings(policy="full"),
        Settings(policy="streaming", budget=64, buffer=8, window=3, protect="sinks:2", seed=-4),
        Settings.of("random", budget=64, buffer=8, scope="grow", align=16, groups=4, unit=2),
        Settings(budget=64, buffer=8, growth=2.5),
        Settings.of(RandomAttention("layer"), budget=64, buffer=8, track_positions=True, scope="trace"),
    ],
)
def test_settings_survive_json(settings: Settings) -> None:
    """The same object for Python, CLI, vLLM configuration and results."""
    again = Settings.from_json(settings.to_json())
    assert Settings.from_dict(settings.to_dict()) == again
    assert again == settings
    assert again.make_policy() == settings.make_policy()
    assert again.make_budget() == settings.make_budget()
    assert again.protection == settings.protection


def test_settings_say_what_was_asked() -> None:
    settings = Settings.of("random", budget=64, buffer=8, window=4, growth=2, scope="grow", align=16, draw="model")
    assert settings.make_budget() == Budget(64, 8, 4, 2, "grow", 16)
    assert settings.make_policy() == RandomAttention("model")
    assert settings.options == {"draw": "model"}
    assert Settings(budget=512).make_budget() == Budget(512, 64, 64)
    assert Settings(budget=64, buffer=8, window=0).make_budget() == Budget(64, 8, 0)  # not "unset"
    assert Settings(policy="full").make_budget() is None
    assert Settings(budget=512).protect_text == "prompt"
    assert Settings(policy="streaming", budget=512).protect_text == "sinks:4"


def test_settings_of_a_policy_object_keep_its_options() -> None:
    assert Settings.of(RandomAttention("layer", unit=2), budget=64, buffer=8).make_policy() == RandomAttention(
        "layer", unit=2
    )
    changed = Settings.of(RandomAttention("layer"), budget=64, buffer=8, options={"draw": "model"}, unit=4)
    assert changed.make_policy() == RandomAttention("model", unit=4)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "needs a budget"),
        ({"budget": 64}, "budget 64 is not larger than the buffer 64"),
        ({"budget": 0, "buffer": 4}, "total must be a whole number of at least 1"),
        ({"budget": 16, "buffer": 4, "window": 17}, "smaller than the window 17"),
        ({"budget": 16, "buffer": 4, "growth": 0.2}, "growth must be a number of at least 1"),
        ({"budget": 16, "buffer": 4, "scope": "prompt"}, "scope"),
        ({"budget": 16, "buffer": 4, "protect": "promt"}, "'promt' is not understood"),
        ({"budget": 16, "buffer": 4, "policy": "ramdom"}, "did you mean random"),
        ({"budget": 16, "buffer": 4, "options": {"drew": 1}}, "no option 'drew'"),
        ({"budget": 16, "buffer": 4, "options": {"unit": 3}}, "unit=3 does not divide the buffer of 4"),
        ({"budget": 18, "buffer": 4, "options": {"unit": 4}}, "unit=4 does not divide the budget of 18"),
        ({"budget": 16, "buffer": 4, "window": 3, "options": {"unit": 2}}, "unit=2 does not divide the window of 3"),
        ({"budget": 16, "buffer": 4, "growth": 2.0, "options": {"unit": 2}}, "unit=2 needs a constant budget"),
        ({"budget": 16, "buffer": 4, "seed": 1.5}, "seed must be a whole number of 64 bits, got 1.5"),
        ({"budget": 16, "buffer": 4, "bufer": 4}, "no field 'bufer': did you mean buffer"),
    ],
)
def test_settings_refuse_what_does_not_fit_together(values: dict[str, Any], says: str) -> None:
    """Before any model is loaded, with the value in the message."""
    with pytest.raises(ValueError) as caught:
        Settings.from_dict(values)
    assert says in str(caught.value)


def test_settings_are_frozen() -> None:
    settings = Settings(budget=512)
    with pytest.raises(FrozenInstanceError):
        settings.budget = 1024  # type: ignore[misc]


def test_groups_go_by_global_heads() -> None:
    """A shard that holds heads 4 to 7 of 8 draws what the whole model draws there (tensor parallel)."""
    whole = RoundView(0, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64),
                      torch.arange(2), torch.arange(8), 8, 16)  # fmt: skip
    shard = replace(whole, heads=torch.arange(4, 8))
    for policy in (RandomAttention(groups=2), RandomAttention(groups=4), RandomAttention()):
        assert torch.equal(policy.draw_keys(whole)[:, :, 4:], policy.draw_keys(shard))
