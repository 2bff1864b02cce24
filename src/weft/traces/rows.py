"""The rows of a trace as data: slices of time on the queues of a rank."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, TypeAlias, final

from weft.units import Bytes

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
        slices: acts and waits, ordered by queue and time. Those of a queue do not overlap, but for
            what a communication waited for, which lies inside of it.
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
        """One line that `RankTrace.of` reads back."""
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
        """The same on a clock that is `offset` nanoseconds behind."""
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
