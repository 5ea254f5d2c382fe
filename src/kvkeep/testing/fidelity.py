"""The checks every scored policy must pass, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..plan import sortable
from ..policies import Policy
from .views import Entries, Made

#: Gaps at the cut below this, relative to the largest score, may go either way in float32.
NEAR = 1e-5

#: The formula of a method: one row's round, entries by [layer][head], to scores by [layer][head][position], higher =
#: keep. Heads that share a kept set get the same scores (or the first one's are read).
Reference = Callable[[Sequence[Sequence[Entries]]], Sequence[Sequence[Mapping[int, float]]]]

#: Rows of unequal fill, gappy positions; grouped, single and as many KV heads as query heads.
SHAPES: tuple[dict[str, Any], ...] = (
    {"lengths": [60, 9, 31]},
    {"lengths": [90, 47], "heads": 1, "group": 4, "kept": 30, "protected": 0},
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
    """Check a policy on made-up rounds: shapes and types, slots, batches, and against its formula.

    - What it returns is float32 or int32 [R, L, H, C] (L or H 1 only as its scope says), without NaN.
    - The same entries in other slots are ranked alike, and so is a row without its neighbours.
    - With ``reference``: each head's victims are those the formula names, however many go.

    Args:
        policy: the method with its options.
        reference: its formula in plain loops.
        shapes: arguments of :class:`Made` for the rounds.
        seeds: rounds of each shape.
        prepare: called with each round before it is shown, e.g. to set digests.

    Returns:
        How many kept sets were compared with the reference, and how many were near ties.

    Raises:
        AssertionError: what differs.
    """
    found = Agreement()
    for shape in shapes:
        for seed in range(seeds):
            made = Made(**{**shape, "seed": seed, "shared": policy.scope})
            if prepare is not None:
                prepare(made)
            scores = _scores(policy, made, shuffle=0)
            _alike(made, scores, _scores(policy, made, shuffle=1), "in other slots")
            for row in range(len(made.lengths)):
                alone = _alone(made, row)
                _alike(alone, scores[row : row + 1], _scores(policy, alone, shuffle=0, stream=row), "alone")
            if reference is not None:
                _compare(found, made, scores, reference)
    return found


def _scores(policy: Policy, made: Made, shuffle: int, stream: int = 0) -> Tensor:
    """What the policy says, int64 or float64 [R, L, H, C] in the order of keeping."""
    view = made.view(shuffle)
    view = replace(view, streams=made.view().streams + 7919 * stream)
    keys = policy.keys(view)
    rows, layers, heads, width = len(made.lengths), made.layers, made.heads, view.candidates
    one_layer = policy.scope in ("model", "head-of-all-layers")
    one_head = policy.scope in ("model", "layer")
    wanted = [rows, 1 if one_layer else layers, 1 if one_head else heads, width]
    if list(keys.shape) not in (wanted, [rows, layers, heads, width]):
        raise AssertionError(f"scope {policy.scope!r} wants keys of shape {wanted}, got {list(keys.shape)}")
    if keys.is_floating_point() and bool(keys.isnan().any()):
        raise AssertionError("the policy returned NaN")
    sortable(keys)  # refuses other types
    return keys.double().expand(rows, layers, heads, width)


def _alone(made: Made, row: int) -> Made:
    alone = replace(made, lengths=[made.lengths[row]])
    alone.heads_of = [made.heads_of[row]]
    if made.digest is not None:
        alone.digest = [state[row : row + 1] for state in made.digest]
    return alone


def _rows(made: Made, scores: Tensor) -> Any:
    for r, row in enumerate(made.heads_of):
        for i, heads in enumerate(row):
            for h, entries in enumerate(heads):
                yield r, i, h, entries, scores[r, i, h, : len(entries.candidates)].tolist()


def _alike(made: Made, one: Tensor, other: Tensor, where: str) -> None:
    agreement = Agreement()
    for (_, _, _, entries, a), (*_, b) in zip(_rows(made, one), _rows(made, other), strict=True):
        theirs = dict(zip(entries.candidates, b, strict=True))
        for victims in range(1, len(entries.candidates)):
            try:
                agreement.compare(entries.candidates, a, theirs, victims)
            except AssertionError as error:
                raise AssertionError(f"the same entries {where} are ranked differently: {error}") from error


def _compare(found: Agreement, made: Made, scores: Tensor, reference: Reference) -> None:
    expected = [reference(row) for row in made.heads_of]
    for r, i, h, entries, ours in _rows(made, scores):
        for victims in range(1, len(entries.candidates)):
            try:
                found.compare(entries.candidates, ours, expected[r][i][h], victims)
            except AssertionError as error:
                raise AssertionError(f"row {r}, layer {i}, head {h}, {victims} victims: {error}") from error
