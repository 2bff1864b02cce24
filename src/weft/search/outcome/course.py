"""The course of a search: what it looked at, one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from weft.units import Seconds


@final
@dataclass(frozen=True)
class LookedAt:
    """A strategy that a search looked at.

    Attributes:
        after: seconds since the search began.
        chain: in which part of it: "points", or a descent or a chain of moves with its number.
        seconds: of a step; None where the strategy was refused, has no room, or takes longer than was asked.
        best: of a step with the best strategy so far; None where nothing fits yet.
        bound: that any strategy takes at least, as far as was known.
    """

    after: Seconds
    chain: str
    seconds: Seconds | None
    best: Seconds | None
    bound: Seconds
