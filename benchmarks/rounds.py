"""Rounds in which systems take turns, until the ratios that count are known well enough."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.crew import Crew, SystemFailure
from benchmarks.load import Load, Watch
from benchmarks.rows import Found, interval, ratios
from benchmarks.systems.table import Entry

# A turn lasts at least so many seconds.
TURN = 0.2
# Rounds that count, unless their number is given.
MOST = 25
# Rounds that others disturb are repeated, as long as it takes no more than so many times the seconds.
PATIENCE = 3.0
# A peer, or a limit, that is this many times slower than another after some quiet rounds is not timed any longer: as
# many as an interval asks for.
BEATEN, SEEN = 1.3, 6
# A median is known when its interval reaches no further than this part of it, to either side.
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
        resident_bytes: of a rank's process, as `Found` has it.
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
    resident_bytes: int
    loss_difference: float | None
    step_seconds: float
    seconds: list[float] = field(default_factory=list)
    idle: float = 0.0

    @property
    def steps(self) -> int:
        """Of a turn."""
        return max(1, math.ceil(TURN / self.step_seconds))

    def found(self, counted: Sequence[int] | None = None, disturbed: int = 0) -> Found:
        """What it showed in the rounds that count; by default in all."""
        rounds = range(len(self.seconds)) if counted is None else counted
        seconds = [self.seconds[each] for each in rounds if each < len(self.seconds)]
        step = statistics.median(seconds)
        again = self.built_again
        return Found(
            self.entry,
            seconds,
            max(0.0, self.built - step),
            None if again is None else max(0.0, again - step),
            self.peak_bytes,
            self.resident_bytes,
            self.loss_difference,
            self.idle,
            disturbed,
        )


@dataclass(frozen=True)
class Rounds:
    """What went on in the rounds.

    Attributes:
        loads: what the machine did besides, for each round.
        least: quiet ones that are enough; with fewer, all count.
        errors: what systems said that failed, by name; each is left out from there.
    """

    loads: Sequence[Load]
    least: int
    errors: dict[str, str]

    @property
    def quiet(self) -> list[int]:
        """The numbers of the rounds that nothing disturbed."""
        return [number for number, load in enumerate(self.loads) if not load.disturbs]

    @property
    def counted(self) -> list[int]:
        """The numbers of the rounds that count."""
        return self.quiet if len(self.quiet) >= self.least else list(range(len(self.loads)))

    @property
    def disturbed(self) -> int:
        """Rounds that count although others disturbed them."""
        return sum(self.loads[number].disturbs for number in self.counted)


def take_turns(sides: Sequence[Side], rounds: int | None, least: int, seconds: float) -> Rounds:
    """Rounds in which every system has a turn, in either order.

    Args:
        sides: the systems.
        rounds: how many; None for as many as it takes until the ratios are known within 1 %, at
            most what fits into `seconds`, those that others disturb not counted.
        least: as many that are quiet there should be, within `PATIENCE` times the seconds; as many at all there are.
        seconds: that all rounds together may take.
    """
    errors: dict[str, str] = {}
    loads: list[Load] = []
    found = Rounds(loads, least, errors)
    running, start = list(sides), time.perf_counter()
    watch = Watch(each for side in sides for each in side.crew.processes)
    for number in range(rounds or int(MOST * PATIENCE)):
        for side in running if number % 2 else running[::-1]:
            try:
                turn = side.crew.turn(side.steps)
            except SystemFailure as failure:
                errors[side.entry.name] = str(failure)
                continue
            side.seconds.append(turn.seconds)
            side.idle = max(side.idle, turn.idle)
        loads.append(watch.load())
        running = [side for side in running if side.entry.name not in errors]
        if rounds is None:
            running = worth_the_time(running, found.quiet)
            if over(running, found, (time.perf_counter() - start) / seconds):
                break
    return found


def over(running: Sequence[Side], found: Rounds, used: float) -> bool:
    """True where the rounds end; `used` is the part of their seconds that is over."""
    if len(found.loads) < found.least:
        return False
    if len(found.quiet) < found.least:
        return used > PATIENCE
    return used > 1 or len(found.quiet) >= MOST or settled(running, found.quiet)


def worth_the_time(sides: Sequence[Side], quiet: Sequence[int]) -> list[Side]:
    """Those that may be the best of their kind by the quiet rounds, and all of weft's."""
    if len(quiet) < SEEN:
        return list(sides)
    medians = {side.entry.name: side.found(quiet).median for side in sides}
    best: dict[str, float] = {}
    for side in sides:
        known = medians[side.entry.name]
        best[side.entry.kind] = min(best.get(side.entry.kind, known), known)
    return [
        side
        for side in sides
        if side.entry.kind == "own" or medians[side.entry.name] <= BEATEN * best[side.entry.kind]
    ]


def settled(sides: Sequence[Side], counted: Sequence[int] | None = None) -> bool:
    """True where the ratios of weft's fastest row to the best peer and to the lowest limit are known well."""
    fastest: dict[str, Found] = {}
    every = (side.found(counted) for side in sides)
    for found in sorted(every, key=lambda each: each.median, reverse=True):
        fastest[found.entry.kind] = found
    own = fastest.pop("own", None)
    return own is None or all(tight(ratios(own, other)) for other in fastest.values())


def tight(values: Sequence[float]) -> bool:
    known, middle = interval(values), statistics.median(values)
    if known is None:
        return False
    return max(known[1] - middle, middle - known[0]) < TIGHT * middle
