"""The shared checks: what every policy must pass, built in or installed, without arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..policies import Policy
from .fidelity import MADE, made_rounds


@dataclass(frozen=True)
class Finding:
    """A check: what it says, and what differs (None: passed)."""

    title: str
    error: str | None


def shared_checks(policy: Policy, total: int = 24, every: int = 4) -> list[Finding]:
    """Run every shared check on a policy: made-up rounds first, then a tiny random model.

    Where the first check (shape, type, NaN) fails nothing else is run.

    Args:
        policy: the method with its options.
        total: K on the model, whose longest text has 46 tokens.
        every: r and w there.
    """
    from .engine import ENGINE  # needs transformers, which made-up rounds do not
    from .trial import Trial

    checks: list[tuple[str, Callable[[], None]]] = []
    if policy.evicts:
        rounds = list(made_rounds(policy))

        def on_all(check: Callable[..., None]) -> None:
            for made in rounds:
                check(policy, made)

        checks += [(title, partial(on_all, check)) for title, check in MADE.items()]
    trial = Trial(policy, total, every)
    checks += [(title, partial(check, trial)) for title, check in ENGINE.items()]
    found: list[Finding] = []
    for title, run in checks:
        found.append(Finding(title, _error(run)))
        if found[0].error:
            break
    return found


def _error(run: Callable[[], None]) -> str | None:
    try:
        run()
    except AssertionError as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
