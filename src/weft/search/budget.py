"""The budget of a search: seconds, or a number of strategies to plan."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from math import inf, isinf
from time import monotonic
from typing import final

from weft.errors import UserError, shown


@final
@dataclass(frozen=True)
class Budget:
    """The end of a search.

    Attributes:
        ends: by the monotonic clock, in seconds.
        begins: by that clock.
        moves: strategies that are planned at most.
    """

    ends: float
    moves: float
    begins: float = 0.0

    @staticmethod
    def of(seconds: object, moves: object) -> Budget:
        """From now on; `moves` counts in place of `seconds` where it is given.

        Raises:
            UserError: one is no number above 0.
        """
        if moves is not None:
            if isinstance(moves, bool) or not isinstance(moves, int) or moves < 1:
                raise UserError(
                    f"weft.search: moves takes the number of strategies to plan, from 1, found {shown(moves)}"
                )
            return Budget(inf, moves)
        if (
            isinstance(seconds, bool)
            or not isinstance(seconds, int | float)
            or not 0 < seconds <= sys.float_info.max
        ):
            raise UserError(
                f"weft.search: seconds takes a number above 0, such as 60, found {shown(seconds)}"
            )
        now = Budget.now()
        return Budget(now + seconds, inf, now)

    @staticmethod
    def now() -> float:
        """Seconds by the monotonic clock."""
        return monotonic()

    def allows(self, planned: int, next_seconds: float = 0.0) -> bool:
        """True where one more strategy may be planned that takes about so many seconds."""
        return planned < self.moves and self.now() + next_seconds < self.ends

    def has(self, seconds: float) -> bool:
        """True where so many seconds are left, before the first strategy or behind it."""
        return self.allows(0, seconds)

    def used_up(self) -> Budget:
        """One that allows nothing."""
        return replace(self, moves=0)

    def part(self) -> float:
        """The part of the seconds that has gone; 0 of a number of strategies."""
        return 0.0 if isinf(self.ends) else (self.now() - self.begins) / (self.ends - self.begins)
