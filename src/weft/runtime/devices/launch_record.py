"""The acts of a rank's list and their times, recorded for traces: the times are those of the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from weft.actors import Act
from weft.runtime.devices.streams import Launch, Streams
from weft.runtime.recording import Interval, Record, Span


@final
class LaunchRecorder:
    """As `weft.runtime.recording.Recorder`, of acts whose times the streams know.

    While `keeping`, the host waits for every step: its events are used again.
    """

    def __init__(self, launches: Sequence[Launch], streams: Streams) -> None:
        self.keeping = False
        self._launches = launches
        self._streams = streams
        self._kept = Record((), ())
        # The last step, if its times were not read yet.
        self._last: tuple[int, int] | None = None

    def begin(self) -> None:
        """A step begins: forget those before, unless they are kept."""
        if not self.keeping:
            self.clear()

    def end(self, step: int, number: int) -> None:
        """All work of the step is on its way; `number` is that of the program."""
        self._last = step, number
        if self.keeping:
            self._read()

    def clear(self) -> None:
        """Forget everything."""
        self._kept, self._last = Record((), ()), None

    def record(self) -> Record:
        """The record that is held now; waits for the end of the last step."""
        self._read()
        return self._kept

    def _read(self) -> None:
        last, self._last = self._last, None
        if last is None:
            return
        step, number = last
        times = self._streams.times()
        spans: list[Span] = [
            (Act(launch.actor, step, launch.micro), begin, end)
            for launch, (begin, end) in zip(self._launches, times, strict=True)
        ]
        ends = [end for _, _, end in spans]
        whole = Interval(
            step,
            min((begin for _, begin, _ in spans), default=0),
            max(ends, default=0),
            number,
        )
        self._kept = Record((*self._kept.steps, whole), (*self._kept.spans, *spans))
