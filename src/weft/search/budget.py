"""The budget of a search: seconds, or a number of strategies to plan; and `weft.Auto`, which says it for a program."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import inf, isinf
from time import monotonic
from typing import final

from weft.errors import is_whole, wrong
from weft.strategy.strategy import Strategy


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
        """A budget from now on; `moves`, if given, replaces `seconds`.

        Raises:
            UserError: one is not a number above 0.
        """
        if moves is not None:
            if not is_whole(moves, 1):
                raise wrong("weft.search: moves", "the number of strategies to plan, from 1", moves)
            return Budget(inf, moves)
        if (
            isinstance(seconds, bool)
            or not isinstance(seconds, int | float)
            or not 0 < seconds <= sys.float_info.max
        ):
            raise wrong("weft.search: seconds", "a number above 0, such as 60", seconds)
        now = Budget.now()
        return Budget(now + seconds, inf, now)

    @staticmethod
    def now() -> float:
        """Seconds by the monotonic clock."""
        return monotonic()

    def allows(self, planned: int, next_seconds: float = 0.0) -> bool:
        """True if one more strategy may be planned that takes about so many seconds."""
        return planned < self.moves and self.now() + next_seconds < self.ends

    def has(self, seconds: float) -> bool:
        """True if so many seconds are left, before the first strategy or after it."""
        return self.allows(0, seconds)

    def part(self, later: float = 0.0) -> float:
        """The part of the seconds that has gone, so many from now; 0 of a number of strategies."""
        if isinf(self.ends):
            return 0.0
        return (self.now() + later - self.begins) / (self.ends - self.begins)


@final
@dataclass(frozen=True)
class Auto:
    """A search for the fastest strategy on the ranks of a program; the first rank searches for all.

    Attributes:
        seconds: that it may take.
        memory_limit: bytes that a rank may take; by default what its device has.
        fixed: entries that hold for every strategy. Stages that name their ranks name those of the placement.
        seed: of the random choices.
        moves: how many strategies are planned at most, in place of seconds: the same strategy on any machine.
        measure: how many of the predicted fastest strategies run some steps on the program's ranks; the fastest
            measured is used. From 2 on they include the fastest handwritten strategy; then the layouts of the fastest
            without micro-batches, ZeRO and recomputation; then the fastest with other numbers of stages and
            micro-batches, because a simulation makes similar errors for similar strategies. 0 and 1 run none. Each
            strategy needs memory for its parts of parameters and states beside the model, and runs with the example
            batch; one that fails is left out, with the reason in the log `weft`. If all fail, the call fails.
    """

    seconds: float = 60.0
    memory_limit: int | None = None
    fixed: Strategy | None = None
    seed: int = 0
    moves: int | None = None
    measure: int = 0
