"""``python -m kvkeep.testing [NAME[:option=value,...] ...]``: are these policies sound? All known ones by default."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..evals.spelling import parse
from ..policies import make_policy, policies
from .shared import shared_checks


def main(texts: Sequence[str]) -> int:
    """Print what each shared check says of each policy.

    Args:
        texts: policies in the notation of ``kvkeep compare``.

    Returns:
        0: all passed; 1: a check failed; 2: there is no such policy or option.
    """
    if any(text.startswith("-") for text in texts):
        print("usage: python -m kvkeep.testing [NAME[:option=value,...] ...]")
        return 0 if set(texts) <= {"-h", "--help"} else 2
    try:
        chosen = {text: make_policy(*parse(text, "policy")) for text in texts or policies()}
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = 0
    for text, policy in chosen.items():
        print(f"{text}: {policy.rule}")
        for finding in shared_checks(policy):
            print(f"  {'passed' if finding.error is None else 'FAILED'}  {finding.title}")
            if finding.error is not None:
                failed += 1
                print(f"          {finding.error}")
    print("all checks passed" if not failed else f"{failed} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
