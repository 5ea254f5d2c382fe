"""The checks every policy must pass on made-up rounds, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..plan import sortable
from ..policies import Policy, shared_axes
from ..signals import DIGEST
from .views import Entries, Made, declared, digests, other_contents

#: Gaps at the cut below this, relative to the largest score, may go either way in float32.
NEAR = 1e-5

#: The formula of a method: one row's round, entries by [layer][head], to scores by [layer][head][position], higher =
#: keep. Heads that share a kept set get the same scores (or the first one's are read).
Reference = Callable[[Sequence[Sequence[Entries]]], Sequence[Sequence[Mapping[int, float]]]]

#: Rows of unequal fill, gappy positions; grouped, single and as many KV heads as query heads.
SHAPES: tuple[dict[str, Any], ...] = (
    {"lengths": [60, 9, 31]},
    {"lengths": [90, 22, 47], "heads": 1, "group": 4, "kept": 30, "protected": 0},
    {"lengths": [300, 40], "heads": 3, "group": 1, "layers": 3, "kept": 33, "window": 6, "w": 3, "width": 4},
)


@dataclass
class Agreement:
    """Kept sets that were compared.

    Attributes:
        compared: rounds of a head.
        near: those among them where the cut was a near tie and the sets differed there.
        gaps: how near, relative to the largest score.
    """

    compared: int = 0
    near: int = 0
    gaps: list[float] = field(default_factory=list)

    def compare(
        self, positions: Sequence[int], ours: Sequence[float], theirs: Mapping[int, float], victims: int
    ) -> None:
        """Assert that the ``victims`` lowest of ``ours`` are those of ``theirs``, ties to the older one."""
        self.compared += 1
        ranked = sorted(range(len(positions)), key=lambda i: (ours[i], positions[i]))
        gone = {positions[i] for i in ranked[:victims]}
        order = sorted(positions, key=lambda p: (theirs[p], p))
        expected = set(order[:victims])
        if gone == expected:
            return
        cut, size = theirs[order[victims - 1]], max(abs(theirs[p]) for p in positions)
        worst = max(abs(theirs[p] - cut) / (size or 1.0) for p in gone ^ expected)
        if worst >= NEAR:
            raise AssertionError(
                f"positions {sorted(gone)} would go, by the reference {sorted(expected)}: scores there differ by "
                f"{worst:.2g} of the largest"
            )
        self.near += 1
        self.gaps.append(worst)


def check_policy(
    policy: Policy,
    reference: Reference | None = None,
    shapes: Sequence[Mapping[str, Any]] = SHAPES,
    seeds: int = 3,
    prepare: Callable[[Made], None] | None = None,
) -> Agreement:
    """Check a policy on made-up rounds: everything in :data:`MADE`, and against its formula.

    With ``reference``, each head's victims are those the formula names, however many go.

    Args:
        policy: the method with its options.
        reference: its formula in plain loops.
        shapes: arguments of :class:`Made` for the rounds.
        seeds: rounds of each shape.
        prepare: called with each round before it is shown, e.g. to set digests; by default those that the policy makes
            of random queries, if it asks for them.

    Returns:
        How many kept sets were compared with the reference, and how many were near ties.

    Raises:
        AssertionError: what differs.
    """
    found = Agreement()
    for made in made_rounds(policy, shapes, seeds, prepare):
        for check in MADE.values():
            check(policy, made)
        if reference is not None:
            _compare(found, made, _scores(policy, made), reference)
    return found


def made_rounds(
    policy: Policy,
    shapes: Sequence[Mapping[str, Any]] = SHAPES,
    seeds: int = 3,
    prepare: Callable[[Made], None] | None = None,
) -> Iterator[Made]:
    """The rounds that :func:`check_policy` shows."""
    for shape in shapes:
        for seed in range(seeds):
            made = Made(**{**shape, "seed": seed, "shared": policy.scope})
            if prepare is not None:
                prepare(made)
            elif DIGEST in policy.signals:
                digests(policy, made)
            yield made


# ---- one check each -----------------------------------------------------------------------------


def _well_formed(policy: Policy, made: Made) -> None:
    _scores(policy, made)


def _repeatable(policy: Policy, made: Made) -> None:
    before = torch.random.get_rng_state()
    first = _scores(policy, made)
    used = not torch.equal(before, torch.random.get_rng_state())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234567)
        if used or not torch.equal(first, _scores(policy, made)):
            raise AssertionError(
                "the same round is scored differently the second time, or torch's global generator was used: random "
                "numbers come from kvkeep.draws, and a policy has no state"
            )


def _slots(policy: Policy, made: Made) -> None:
    hint = "the order of slots means nothing, so turn slots into positions with layer.chosen() or layer.ascending()"
    _alike(made, _scores(policy, made), _scores(policy, made, shuffle=1), "in other slots", hint)


def _empty_slots(policy: Policy, made: Made) -> None:
    hint = "empty slots hold anything, so mask with layer.filled, layer.eligible or layer.there()"
    _alike(made, _scores(policy, made), _scores(policy, made, rubbish=1), "with other rubbish in empty slots", hint)


def _neighbours(policy: Policy, made: Made) -> None:
    scores = _scores(policy, made)
    hint = "a row may not depend on other rows, nor on the padding behind the candidates of a short row (layer.there())"
    for row in range(len(made.lengths)):
        alone = _alone(made, row)
        _alike(alone, scores[row : row + 1], _scores(policy, alone, stream=row), "without the rest of its batch", hint)


def _content_free(policy: Policy, made: Made) -> None:
    if policy.content_free:
        hint = "content_free = True promises that keys, values, queries and what is made of them change nothing"
        _alike(made, _scores(policy, made), _scores(policy, other_contents(made)), "with other contents", hint)


#: What must hold on every made-up round: title -> check, which raises AssertionError.
MADE: dict[str, Callable[[Policy, Made], None]] = {
    "scores have the shape and type that its scope says, without NaN, from declared signals alone": _well_formed,
    "the same round is scored the same again, and nothing shown is overwritten": _repeatable,
    "the order of slots changes nothing": _slots,
    "what lies in empty slots changes nothing": _empty_slots,
    "the other rows of a batch change nothing": _neighbours,
    "content_free is true where it is claimed": _content_free,
}


def _scores(policy: Policy, made: Made, shuffle: int = 0, rubbish: int = 0, stream: int = 0) -> Tensor:
    """What the policy says, float64 [R, L, H, C] in the order of keeping."""
    view = declared(made.view(shuffle, rubbish=rubbish), policy.signals)
    view = replace(view, streams=view.streams + 7919 * stream)
    shown = [] if view.layer is None else [view.layer(i) for i in range(made.layers)]
    tensors = [(name, t) for layer in shown for name, t in vars(layer).items() if isinstance(t, Tensor)]
    versions = [t._version for _, t in tensors]
    try:
        keys = policy.keys(view)
    except Exception as error:
        raise AssertionError(
            f"it fails on a made-up round, {type(error).__name__}: {error} (a view shows only the signals that the "
            f"policy declares: {', '.join(sorted(policy.signals)) or 'none'})"
        ) from error
    for (name, tensor), version in zip(tensors, versions, strict=True):
        if tensor._version != version:
            raise AssertionError(f"it writes into {name} that it was shown, which is the cache itself: work on a copy")
    rows, layers, heads, width = len(made.lengths), made.layers, made.heads, view.candidates
    wanted = [rows, *shared_axes(policy.scope, layers, heads), width // policy.slots_per_unit]
    if list(keys.shape) != wanted:
        raise AssertionError(
            f"scope {policy.scope!r} wants scores of shape [R, L, H, C] = {wanted}, got {list(keys.shape)}: return 1 "
            "where layers or heads share a kept set, and let `scope` say so"
        )
    if keys.is_floating_point() and bool(keys.isnan().any()):
        at = keys.isnan().nonzero()[0].tolist()
        raise AssertionError(f"it returned NaN, first at [row, layer, head, candidate] = {at}")
    try:
        sortable(keys)
    except TypeError as error:
        raise AssertionError(str(error)) from error
    scores = keys.double().repeat_interleave(policy.slots_per_unit, dim=-1)
    scores = torch.nn.functional.pad(scores, (0, width - scores.shape[-1]), value=torch.inf)
    return scores.expand(rows, layers, heads, width)


def _alone(made: Made, row: int) -> Made:
    alone = replace(made, lengths=[made.lengths[row]])
    alone.rotary = made.rotary
    alone.heads_of = [made.heads_of[row]]
    if made.digest is not None:
        alone.digest = [state[row : row + 1] for state in made.digest]
    return alone


def _rows(made: Made, scores: Tensor) -> Any:
    for r, row in enumerate(made.heads_of):
        for i, heads in enumerate(row):
            for h, entries in enumerate(heads):
                yield r, i, h, entries, scores[r, i, h, : len(entries.candidates)].tolist()


def _alike(made: Made, one: Tensor, other: Tensor, where: str, hint: str) -> None:
    agreement = Agreement()
    for (r, i, h, entries, a), (*_, b) in zip(_rows(made, one), _rows(made, other), strict=True):
        theirs = dict(zip(entries.candidates, b, strict=True))
        if _order(a) == _order(b):
            continue
        for victims in range(1, len(entries.candidates)):
            try:
                agreement.compare(entries.candidates, a, theirs, victims)
            except AssertionError as error:
                raise AssertionError(
                    f"the same entries {where} are ranked differently ({hint}): row {r}, layer {i}, head {h}, "
                    f"{victims} victims: {error}"
                ) from error


def _order(scores: Sequence[float]) -> list[int]:
    return sorted(range(len(scores)), key=scores.__getitem__)


def _compare(found: Agreement, made: Made, scores: Tensor, reference: Reference) -> None:
    expected = [reference(row) for row in made.heads_of]
    for r, i, h, entries, ours in _rows(made, scores):
        for victims in range(1, len(entries.candidates)):
            try:
                found.compare(entries.candidates, ours, expected[r][i][h], victims)
            except AssertionError as error:
                raise AssertionError(f"row {r}, layer {i}, head {h}, {victims} victims: {error}") from error
