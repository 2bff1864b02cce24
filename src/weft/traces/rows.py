"""The rows of a trace as data: slices of time on the queues of a rank."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple, TypeAlias, final

from weft.ir.plan import COMPUTE
from weft.units import Bytes, Seconds

Kind: TypeAlias = Literal["compute", "communication", "host", "wait"]


@final
class Slice(NamedTuple):
    """Something that lasted.

    Attributes:
        queue: where.
        name: what, in a few words.
        kind: an act's, or "wait": what the queue waited for.
        begin, end: nanoseconds on the clock of the trace.
        details: what else is known.
        meeting: what all ranks of a communicator do together has the same; else empty.
        peers: the ranks that a communication may wait for, or that was waited for.
    """

    queue: str
    name: str
    kind: Kind
    begin: int
    end: int
    details: dict[str, str | int]
    meeting: str = ""
    peers: tuple[int, ...] = ()


@final
class Arrow(NamedTuple):
    """A version of a register on its way from the queue that made it to one that read it.

    Attributes:
        register: its name.
        source, target: the queues.
        made: when its producer ended, in nanoseconds.
        read: when its reader began.
    """

    register: str
    source: str
    target: str
    made: int
    read: int


@final
class Level(NamedTuple):
    """The bytes that a rank holds from a moment on, in nanoseconds."""

    time: int
    bytes: Bytes


@final
class StepSpan(NamedTuple):
    """A step, or the wait for its batch: the step's number, when it began and ended, in nanoseconds."""

    number: int
    begin: int
    end: int


@final
@dataclass(frozen=True)
class RankTrace:
    """The trace of one rank.

    Attributes:
        rank: which.
        queues: its queues, with the ranks of the communicators; from the first row to the last.
        steps: those recorded.
        slices: acts and waits, ordered by queue and time. Slices of one queue do not overlap, except a
            communication's wait, which is inside its slice.
        arrows: what passed between its queues.
        levels: what it held, as its plan says of the order in which the acts ran.
        data: the waits for the batches of steps, each before its step.
    """

    rank: int
    queues: tuple[tuple[str, tuple[int, ...]], ...]
    steps: tuple[StepSpan, ...]
    slices: tuple[Slice, ...]
    arrows: tuple[Arrow, ...] = ()
    levels: tuple[Level, ...] = ()
    data: tuple[StepSpan, ...] = ()

    def text(self) -> str:
        """The trace as one line that `RankTrace.of` reads back."""
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> RankTrace:
        """Read what `text` wrote."""
        found = json.loads(text)
        return RankTrace(
            found["rank"],
            tuple((name, tuple(ranks)) for name, ranks in found["queues"]),
            tuple(StepSpan(*row) for row in found["steps"]),
            tuple(Slice(*row)._replace(peers=tuple(row[-1])) for row in found["slices"]),
            tuple(Arrow(*row) for row in found["arrows"]),
            tuple(Level(*row) for row in found["levels"]),
            tuple(StepSpan(*row) for row in found["data"]),
        )

    def moved(self, offset: int) -> RankTrace:
        """The trace on a clock that is `offset` nanoseconds behind."""
        return RankTrace(
            self.rank,
            self.queues,
            _moved(self.steps, offset),
            tuple(s._replace(begin=s.begin - offset, end=s.end - offset) for s in self.slices),
            tuple(a._replace(made=a.made - offset, read=a.read - offset) for a in self.arrows),
            tuple(Level(time - offset, size) for time, size in self.levels),
            _moved(self.data, offset),
        )


def _moved(spans: tuple[StepSpan, ...], offset: int) -> tuple[StepSpan, ...]:
    return tuple(StepSpan(n, begin - offset, end - offset) for n, begin, end in spans)


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
    """The shares of a rank's time, from intervals of nanoseconds; `waiting`: for other ranks to begin."""

    def seconds(intervals: Intervals) -> Seconds:
        return Seconds(sum((end - begin for begin, end in intervals)) / len(steps) / 1e9)

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


def _union(intervals: Iterable[tuple[int, int]]) -> Intervals:
    joined: Intervals = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def _without(intervals: Intervals, holes: Sequence[tuple[int, int]]) -> Intervals:
    """The parts of the intervals that are outside of the holes; both in order."""
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
