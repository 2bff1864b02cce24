"""The shares of a step's time: computing, communicating, waiting."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, final

from weft.ir.plan import COMPUTE
from weft.traces.rows import RankTrace, Slice
from weft.units import Seconds

# Intervals of nanoseconds, in order, that do not touch.
Intervals: TypeAlias = "list[tuple[int, int]]"

NOTHING = Seconds(0.0)


@final
@dataclass(frozen=True)
class TimeParts:
    """The shares of one rank's time, in seconds a step: the mean over the steps of a trace.

    Attributes:
        rank: which.
        step: from the beginning to the end of a step.
        compute: the compute queue acts.
        communication: some communicator acts.
        exposed: of `communication`, what is not hidden: the compute queue does nothing meanwhile.
        late: of `exposed`, communications that have begun here wait for another rank to begin.
        idle: neither the compute queue nor a communicator acts.
        data: the wait for the batch, before the step.
    """

    rank: int
    step: Seconds
    compute: Seconds
    communication: Seconds
    exposed: Seconds
    late: Seconds
    idle: Seconds
    data: Seconds = NOTHING

    @property
    def hidden(self) -> Seconds:
        """Communication beside which the compute queue acts."""
        return Seconds(self.communication - self.exposed)


def parts(trace: RankTrace) -> TimeParts:
    """The shares of a rank's time; slices that wait for other ranks must be marked (`late`)."""
    found = parts_of(
        trace.rank,
        [(begin, end) for _, begin, end in trace.steps],
        _times(s for s in trace.slices if s.kind == "compute" and s.queue == COMPUTE),
        _times(s for s in trace.slices if s.kind == "communication"),
        _times(s for s in trace.slices if s.kind == "wait" and s.peers),
    )
    waited = sum(end - begin for _, begin, end in trace.data)
    return replace(found, data=Seconds(waited / len(trace.steps) / 1e9))


def parts_of(
    rank: int,
    steps: Intervals,
    computing: Iterable[tuple[int, int]],
    communicating: Iterable[tuple[int, int]],
    waiting: Iterable[tuple[int, int]] = (),
) -> TimeParts:
    """The shares of a rank's time, from intervals of nanoseconds.

    Args:
        rank: which.
        steps: in order; they do not overlap.
        computing: when the compute queue acts.
        communicating: when communicators act.
        waiting: when they wait for other ranks to begin.
    """

    def seconds(intervals: Intervals) -> Seconds:
        return Seconds(_length(intervals) / len(steps) / 1e9)

    compute, communicate = _union(computing), _union(communicating)
    late = _union(waiting)
    exposed = _without(communicate, compute)
    return TimeParts(
        rank,
        seconds(steps),
        seconds(compute),
        seconds(communicate),
        seconds(exposed),
        seconds(_without(late, compute)),
        seconds(_without(_without(steps, compute), communicate)),
    )


def _times(slices: Iterable[Slice]) -> Iterator[tuple[int, int]]:
    return ((each.begin, each.end) for each in slices)


def _length(intervals: Intervals) -> int:
    return sum(end - begin for begin, end in intervals)


def _union(intervals: Iterable[tuple[int, int]]) -> Intervals:
    joined: Intervals = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _without(intervals: Intervals, holes: Sequence[tuple[int, int]]) -> Intervals:
    """The parts of the intervals that lie outside of the holes; both in order."""
    left: Intervals = []
    place = 0
    for first, last in intervals:
        begin = first
        while place and holes[place - 1][1] > begin:
            place -= 1  # a hole may reach over several intervals
        while place < len(holes) and holes[place][0] < last:
            if holes[place][0] > begin:
                left.append((begin, holes[place][0]))
            begin = max(begin, holes[place][1])
            place += 1
        if begin < last:
            left.append((begin, last))
    return left
