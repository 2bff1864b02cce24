"""The acts of a rank's queues in a step and their times: recorded all the time, read when somebody asks.

A queue appends a tuple for each act to a list of its own, on its own thread. Everything else, such
as what a queue waited for, follows from these times and the plan (`weft.program.inspect`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple, TypeAlias, final

from weft.actors import Act

# What a queue appends after each act: the act, and when it began and ended, in nanoseconds of
# `perf_counter_ns`: on Linux the same clock in all processes of a host.
Span: TypeAlias = "tuple[Act, int, int]"


@final
class Interval(NamedTuple):
    """A step of one executor, the program's number of the step, and its times in nanoseconds of `perf_counter_ns`."""

    step: int
    begin: int
    end: int
    number: int


@final
@dataclass(frozen=True)
class Record:
    """The record of a rank's acts."""

    steps: tuple[Interval, ...]
    spans: tuple[Span, ...]


@final
class Recorder:
    """Holds what the queues of one rank did in the last step, or in all steps while `keeping`."""

    def __init__(self, rows: Iterable[list[Span]]) -> None:
        self.keeping = False
        self._rows = tuple(rows)
        self._steps: list[Interval] = []
        self._begun = 0

    def begin(self) -> None:
        """A step begins: forget those before, unless they are kept."""
        if not self.keeping:
            self.clear()
        self._begun = perf_counter_ns()

    def end(self, step: int, number: int) -> None:
        """The step has ended; `number` is that of the program."""
        self._steps.append(Interval(step, self._begun, perf_counter_ns(), number))

    def clear(self) -> None:
        """Forget everything."""
        self._steps.clear()
        for row in self._rows:
            row.clear()

    def record(self) -> Record:
        """The record that is held now, without a step that failed; call it between two steps."""
        ended = {interval.step for interval in self._steps}
        spans = (span for row in self._rows for span in row if span[0].step in ended)
        return Record(tuple(self._steps), tuple(spans))
