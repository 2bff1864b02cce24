"""`weft.Auto`: a strategy that is searched when a program is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from weft.strategy.strategy import Strategy


@final
@dataclass(frozen=True)
class Auto:
    """A search for the fastest strategy on the ranks of a program, by the first of them, for all.

    Attributes:
        seconds: that it may take.
        memory_limit: bytes that a rank may take; by default what its device has.
        fixed: entries that hold for every strategy. Stages that name their ranks name those of the placement.
        seed: of what is drawn.
        moves: how many strategies are planned at most, in place of seconds: the same strategy on any machine.
        measure: how many of those that should be fastest run some steps, on the ranks of the program; the one that
            is fastest then is taken. From 2 on the quickest that people write by hand is among them; then the layouts
            of the quickest without micro-batches, ZeRO and recomputation; then the quickest of other numbers of
            stages and micro-batches: a simulation errs alike about strategies that are alike.
            0 and 1 run none. Each takes its parts of parameters and states beside the model, and runs with the values
            of the example batch; one that fails is left out, and why stands in the log `weft`. Where all fail the call
            does.
    """

    seconds: float = 60.0
    memory_limit: int | None = None
    fixed: Strategy | None = None
    seed: int = 0
    moves: int | None = None
    measure: int = 0
