"""Rounds in which systems take turns, until the ratios that count are known well enough."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.crew import Crew, SystemFailure
from benchmarks.rows import Found, quartiles, ratios
from benchmarks.systems.table import Entry

# A turn lasts at least so many seconds.
TURN = 0.2
# Rounds, unless their number is given.
MOST = 25
# A peer that is this many times slower than another after some rounds is not timed any longer.
BEATEN, SEEN = 1.3, 3
# Quartiles are tight when their distance, over the root of the number of rounds, is this part of the median.
TIGHT = 0.01


@dataclass
class Side:
    """A system while it is measured.

    Attributes:
        entry: the system.
        crew: its processes.
        built: seconds to build it and run the first step, with cold caches.
        built_again: the same in new processes, with what the first left on disk.
        peak_bytes: of the tensors of one rank.
        loss_difference: largest relative difference from the reference.
        step_seconds: about.
        seconds: of a step, in each round so far.
        idle: the part of one core that one of its processes used while others had their turns.
    """

    entry: Entry
    crew: Crew
    built: float
    built_again: float | None
    peak_bytes: int
    loss_difference: float | None
    step_seconds: float
    seconds: list[float] = field(default_factory=list)
    idle: float = 0.0

    @property
    def steps(self) -> int:
        """Of a turn."""
        return max(1, math.ceil(TURN / self.step_seconds))

    def found(self) -> Found:
        step = statistics.median(self.seconds)
        again = self.built_again
        return Found(
            self.entry,
            self.seconds,
            max(0.0, self.built - step),
            None if again is None else max(0.0, again - step),
            self.peak_bytes,
            self.loss_difference,
            self.idle,
        )


def take_turns(
    sides: Sequence[Side], rounds: int | None, least: int, seconds: float
) -> dict[str, str]:
    """Rounds in which every system has a turn, in either order.

    Args:
        sides: the systems.
        rounds: how many; None for as many as it takes until the ratios are known within about 1 %,
            at most what fits into `seconds`.
        least: as many there are in any case.
        seconds: that all rounds together may take.

    Returns:
        what those said that failed, by name; each is left out from there.
    """
    errors: dict[str, str] = {}
    running, deadline = list(sides), time.perf_counter() + seconds
    for number in range(rounds or MOST):
        for side in running if number % 2 else running[::-1]:
            try:
                turn = side.crew.turn(side.steps)
            except SystemFailure as failure:
                errors[side.entry.name] = str(failure)
                continue
            side.seconds.append(turn.seconds)
            side.idle = max(side.idle, turn.idle)
        running = [side for side in running if side.entry.name not in errors]
        if rounds is None:
            running = worth_the_time(running)
            late = time.perf_counter() > deadline
            if number + 1 >= least and (late or settled(running)):
                break
    return errors


def worth_the_time(sides: Sequence[Side]) -> list[Side]:
    """Those that may be the best of their kind, the limit, and weft."""
    peers = [side for side in sides if side.entry.kind == "peer"]
    best = min((median(side) for side in peers), default=0.0)
    return [
        side
        for side in sides
        if side not in peers or len(side.seconds) < SEEN or median(side) <= BEATEN * best
    ]


def settled(sides: Sequence[Side]) -> bool:
    """Whether the ratios of weft's fastest row to the best peer and to the limit are known well."""
    fastest: dict[str, Found] = {}
    for side in sorted(sides, key=median, reverse=True):
        fastest[side.entry.kind] = side.found()
    own = fastest.pop("own", None)
    return own is None or all(tight(ratios(own, other)) for other in fastest.values())


def tight(values: Sequence[float]) -> bool:
    low, high = quartiles(values)
    return (high - low) / math.sqrt(len(values)) < TIGHT * statistics.median(values)


def median(side: Side) -> float:
    return statistics.median(side.seconds)
