"""The shared checks over every registered policy, built in or installed, and that they can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvkeep.policies import Policy, RandomAttention, SnapKV, make_policy, policies
from kvkeep.policies.base import PolicyScope
from kvkeep.signals import KEYS, POSITIONS, LayerView, RoundView
from kvkeep.testing import check_policy, shared_checks
from kvkeep.testing.__main__ import main
from kvkeep.testing.engine import ENGINE, chunks, invariants, logits, nothing_lost, padded_batch, unprotected
from kvkeep.testing.fidelity import MADE, made_rounds
from kvkeep.testing.trial import Frame, Trial

torch.set_num_threads(1)  # the workers of a test run share the cores

#: Options that change what is shown, shared or split; and methods that do little on 24 entries by default.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("random", {"draw": "layer"}),
    ("random", {"draw": "model"}),
    ("random", {"unit": 4}),
    ("lagkv", {"lag": 4}),
    ("rpc", {"heads": "group"}),
    ("infokv", {"adaptive": True, "alpha": 0.5}),
    ("infokv", {"heads": "layer"}),
    ("triattention", {"mode": "per_layer"}),
    ("triattention", {"mode": "global"}),
    ("beaconkv", {"beacons": 4, "recent": 4}),
    ("vase", {"queries": 4}),
    ("mix", {"second": "beaconkv+beacons=4+recent=4", "share": 0.4}),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(policies()))
def test_every_registered_policy(name: str) -> None:
    policy = make_policy(name)
    found = shared_checks(policy)
    assert [(f.title, f.error) for f in found if f.error] == []
    assert [f.title for f in found] == [*(MADE if policy.evicts else ()), *ENGINE]


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=lambda x: x if isinstance(x, str) else str(x))
def test_options(name: str, options: dict[str, Any]) -> None:
    assert [(f.title, f.error) for f in shared_checks(make_policy(name, options)) if f.error] == []


# ---- policies that are wrong --------------------------------------------------------------------


@dataclass(frozen=True)
class Longest(Policy):
    """Right, until a test breaks it: keep the longest keys."""

    name: ClassVar[str] = "longest"
    signals: ClassVar[frozenset[str]] = frozenset({POSITIONS, KEYS})

    def score(self, view: RoundView) -> Tensor:
        return view.by_layer(self.layer)

    def layer(self, layer: LayerView) -> Tensor:
        return layer.chosen(layer.keys.float().norm(dim=-1))


class SlotOrder(Longest):
    """Forgets that candidates come by position."""

    def layer(self, layer: LayerView) -> Tensor:
        return layer.candidates(layer.keys.float().norm(dim=-1))


class Neighbours(Longest):
    """Depends on how many rows there are."""

    def layer(self, layer: LayerView) -> Tensor:
        scores = super().layer(layer)
        return scores if len(scores) == 1 else -scores


class Padding(Longest):
    """Takes what lies behind a short row's candidates for candidates."""

    def layer(self, layer: LayerView) -> Tensor:
        scores = super().layer(layer)
        return (scores - scores.mean(dim=-1, keepdim=True)).abs()


class EmptySlots(Longest):
    """Takes what lies in empty slots for entries."""

    def layer(self, layer: LayerView) -> Tensor:
        away = layer.keys.float() - layer.keys.float().mean(dim=2, keepdim=True)
        return layer.chosen(away.norm(dim=-1))


class NotANumber(Longest):
    def layer(self, layer: LayerView) -> Tensor:
        return (super().layer(layer) - 1.0).log()


class Doubles(Longest):
    def score(self, view: RoundView) -> Tensor:
        return super().score(view).double()


class Halves(Longest):
    def score(self, view: RoundView) -> Tensor:
        return super().score(view).half()


class TooMany(Longest):
    """Says that heads share, and lets each choose."""

    @property
    def scope(self) -> PolicyScope:
        return "layer"


class TooFew(Longest):
    """Lets heads share, and does not say so."""

    def score(self, view: RoundView) -> Tensor:
        return super().score(view).mean(dim=2, keepdim=True)


class WholeLayer(Longest):
    """Forgets the layers."""

    def score(self, view: RoundView) -> Tensor:
        return super().score(view)[:, 0]


class Undeclared(Longest):
    def layer(self, layer: LayerView) -> Tensor:
        return layer.chosen(layer.values.float().norm(dim=-1))  # type: ignore[union-attr]


class Global(Longest):
    def layer(self, layer: LayerView) -> Tensor:
        return torch.rand_like(super().layer(layer))


class Remembers(Longest):
    calls: ClassVar[list[int]] = []

    def layer(self, layer: LayerView) -> Tensor:
        self.calls.append(1)
        return super().layer(layer) * (-1) ** (len(self.calls) // 2)


class Writes(Longest):
    def layer(self, layer: LayerView) -> Tensor:
        layer.keys.mul_(1.01)
        return super().layer(layer)


class Claims(Longest):
    content_free: ClassVar[bool] = True


BROKEN: list[tuple[type[Longest], str, str]] = [
    (SlotOrder, "the order of slots", "in other slots are ranked differently .the order of slots means nothing"),
    (
        Neighbours,
        "the other rows",
        "without the rest of its batch are ranked differently .a row may not depend on other",
    ),
    (Padding, "the other rows", r"nor on the padding behind the candidates of a short row \(layer.there"),
    (EmptySlots, "what lies in empty slots", "with other rubbish in empty slots .* mask with layer.filled"),
    (NotANumber, "scores have the shape", r"it returned NaN, first at \[row, layer, head, candidate\] = \[0, "),
    (Doubles, "scores have the shape", "returns int32 draws or float32 scores, got torch.float64"),
    (Halves, "scores have the shape", "returns int32 draws or float32 scores, got torch.float16"),
    (
        TooMany,
        "scores have the shape",
        r"scope 'layer' wants scores of shape .* = \[3, 2, 1, 17\], got \[3, 2, 2, 17\]",
    ),
    (TooFew, "scores have the shape", r"scope 'head' wants scores .* got \[3, 2, 1, 17\]: .* let `scope` say so"),
    (WholeLayer, "scores have the shape", r"got \[3, 2, 17\]"),
    (
        Undeclared,
        "scores have the shape",
        "AttributeError: .*only the signals that the policy declares: keys, positions",
    ),
    (Global, "the same round", "torch's global generator was used: random numbers come from kvkeep.draws"),
    (Remembers, "the same round", "a policy has no state"),
    (Writes, "scores have the shape", "writes into keys that it was shown, which is the cache itself"),
    (Claims, "content_free is true", "with other contents are ranked differently .content_free = True promises"),
]


def failing(policy: Policy) -> Iterator[str]:
    """Titles of the made-up checks that a policy does not pass."""
    for title, check in MADE.items():
        for made in made_rounds(policy):
            try:
                check(policy, made)
            except AssertionError:
                yield title


def test_what_is_right_passes() -> None:
    assert [f for f in shared_checks(Longest()) if f.error] == []


@pytest.mark.parametrize(("broken", "title", "says"), BROKEN, ids=[b[0].__name__ for b in BROKEN])
def test_what_is_wrong_is_named(broken: type[Longest], title: str, says: str) -> None:
    policy = broken()
    with pytest.raises(AssertionError, match=says):
        check_policy(policy)
    assert next(iter(failing(policy))).startswith(title)


@pytest.mark.parametrize(
    ("broken", "check", "says"),
    [
        (Global, padded_batch, "row 0 of a padded batch, .* lacks .* compared with alone"),
        (Global, chunks, r"trace in chunks of \(2, 4, 1, 3\), after .* compared with token by token"),
        (Neighbours, padded_batch, "lacks"),
        (Writes, logits, "logits differ by .* from a full cache under the mask"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_a_model_notices_too(broken: type[Longest], check: Callable[[Trial], None], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check(Trial(broken()))


# ---- engines that are wrong ---------------------------------------------------------------------


class Tampered(Trial):
    """Runs of an engine that does something to one frame."""

    def __init__(self, policy: Policy, at: int, change: Callable[[Frame], Frame], check: Any) -> None:
        super().__init__(policy)
        self.at, self.change, self.check = at, change, check

    def _run(self, rows: Any, *args: Any, **values: Any) -> list[Frame]:
        frames = super()._run(rows, *args, **values)
        if self.check is padded_batch and len(rows) == 1:
            return frames
        frames[self.at] = self.change(frames[self.at])
        return frames


def head(change: Callable[[list[int]], list[int]]) -> Callable[[Frame], Frame]:
    """What layer 1, head 1 of row 0 keeps is changed."""

    def changed(frame: Frame) -> Frame:
        kept = [[[list(h) for h in heads] for heads in row] for row in frame.kept]
        kept[0][1][1] = change(kept[0][1][1])
        return replace(frame, kept=kept)

    return changed


def every_head(change: Callable[[list[int]], list[int]]) -> Callable[[Frame], Frame]:
    return lambda frame: replace(frame, kept=[[[change(h) for h in heads] for heads in row] for row in frame.kept])


def other_logits(frame: Frame) -> Frame:
    return replace(frame, logits=frame.logits + 5e-5)


@pytest.mark.parametrize(
    ("policy", "at", "change", "check", "says"),
    [
        (SnapKV(), 17, head(lambda p: p[1:]), invariants, r"layer 1, head 1 after 26 tokens: protected \[0\] are gone"),
        (SnapKV(), 16, head(lambda p: [*p[:-3], *p[-2:]]), invariants, r"of the newest w \[22\] are gone"),
        (SnapKV(), 30, head(lambda p: [*p[:-2], p[-1], p[-1]]), invariants, "a position is held twice"),
        (SnapKV(), 30, head(lambda p: [*p[:9], *sorted({*range(9, 39)} - {*p})[:1], *p[10:]]), invariants, "came back"),
        (SnapKV(), 30, head(lambda p: p[:9] + p[10:]), invariants, "heads hold different numbers"),
        (
            SnapKV(),
            30,
            every_head(lambda p: p[:9] + p[10:]),
            invariants,
            "a round left 23 entries, not 24|a round left",
        ),
        (SnapKV(), 30, other_logits, logits, "after 39 tokens logits differ by .*e-05"),
        (SnapKV(), 30, head(lambda p: p[1:]), logits, "after 39 tokens logits differ"),
        (SnapKV(), 30, other_logits, unprotected, "logits differ by .*e-05"),
        (SnapKV(), -1, head(lambda p: p[1:]), nothing_lost, r"budget of 200 for 46 tokens, \{0\} are gone"),
        (SnapKV(), 30, other_logits, nothing_lost, "logits differ by .*e-05"),
        (SnapKV(), 30, other_logits, padded_batch, "row 0 of a padded batch, 30 tokens into the trace: logits differ"),
    ],
)
def test_engines_that_are_wrong(
    policy: Policy, at: int, change: Callable[[Frame], Frame], check: Callable[[Trial], None], says: str
) -> None:
    check(Trial(policy))
    with pytest.raises(AssertionError, match=says):
        check(Tampered(policy, at, change, check))


def test_heads_that_should_share_are_compared() -> None:
    class Shared(RandomAttention):  # a scope that the engine's runs of another policy do not have
        name: ClassVar[str] = "shared"

    trial = Trial(RandomAttention("head"))
    trial.run()
    lying = Trial(Shared("layer"), _runs=trial._runs)
    with pytest.raises(AssertionError, match="scope 'layer' shares kept sets, but"):
        invariants(lying)


# ---- the command --------------------------------------------------------------------------------


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recency", "random:draw=layer"]) == 0
    said = capsys.readouterr().out
    assert said.count("passed  ") == 2 * (len(MADE) + len(ENGINE))
    assert said.endswith("all checks passed\n")
    assert main(["snapvk"]) == 2
    assert "did you mean snapkv" in capsys.readouterr().err
    assert main(["random:draw=all"]) == 2
    assert "draw must be one of" in capsys.readouterr().err


def test_the_command_says_what_fails(capsys: pytest.CaptureFixture[str]) -> None:
    from kvkeep.policies import register

    register(Neighbours)
    assert main(["longest"]) == 1
    said = capsys.readouterr().out
    assert "FAILED  the other rows of a batch change nothing\n          the same entries without the rest" in said
    assert "passed  the order of slots changes nothing" in said
    assert said.splitlines()[-1].endswith("checks failed")


@pytest.mark.slow
def test_it_is_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvkeep.testing", "full"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("passed  ") == len(ENGINE)
