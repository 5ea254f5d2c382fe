"""What outranks every score."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Protection:
    """Positions that outrank every score.

    Args:
        share: share of the prompt, counted from its beginning, that is protected (1.0: all of it).
        sinks: number of first tokens that is protected.
        pins: half-open position ranges ``(first, end)`` that are protected wherever they lie.
            Pins beyond the protected prefix need the position store.
    """

    share: float = 0.0
    sinks: int = 0
    pins: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Protection:
        """Read ``prompt``, ``prompt:0.5``, ``sinks:4``, ``pin:10-20,40-48`` or ``none``; join several with ``+``.

        Raises:
            ValueError: the text is none of these.
        """
        share, sinks, pins = 0.0, 0, []
        for part in text.split("+"):
            name, _, value = part.strip().partition(":")
            try:
                if name == "prompt":
                    share = float(value) if value else 1.0
                elif name == "sinks":
                    sinks = int(value)
                elif name == "pin":
                    pins += [cls._range(item) for item in value.split(",")]
                elif name != "none" or value:
                    raise ValueError(name)
            except ValueError as error:
                raise ValueError(
                    f"protection {part.strip()!r} is not understood; use prompt, prompt:0.5 (the first half of the "
                    "prompt), sinks:4, pin:10-20 (positions 10 to 19), none, or several joined by +"
                ) from error
        if not 0 <= share <= 1 or sinks < 0:
            raise ValueError(f"protection {text!r}: a share lies between 0 and 1 and a count is not negative")
        return cls(share, sinks, tuple(sorted(pins)))

    @staticmethod
    def _range(text: str) -> tuple[int, int]:
        match = re.fullmatch(r"\s*(\d+)-(\d+)\s*", text)
        if match is None or int(match[1]) >= int(match[2]):
            raise ValueError(text)
        return int(match[1]), int(match[2])

    def prefix(self, prompt_length: int) -> int:
        """P, the length of the protected prefix of a prompt of ``prompt_length`` tokens."""
        return max(ceil(self.share * prompt_length), min(self.sinks, prompt_length))

    def pinned(self, prefix: int, seen: int | None = None) -> int:
        """Number of pinned positions from ``prefix`` on, and before ``seen`` if that is given."""
        taken, end = 0, prefix
        for first, last in self.pins:  # sorted, possibly overlapping
            last = last if seen is None else min(last, seen)
            taken += max(0, last - max(first, end))
            end = max(end, last)
        return taken
