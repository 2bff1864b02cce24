"""The virtual clock of tasks: when each begins and ends.

At each time, everything ends that ends then, and what was only waiting for that begins; when nothing more
happens so, each idle lane begins the first of what it may: those that last no time end at the same time,
and so on. It is what `weft.actors.simulate` does with the machines of `weft.actors.machine`; a test compares.

On its way a clock notes its state now and then. From such a note it goes on when something is changed that
matters later only, and where it comes to a note's state again, at that time or at another, the rest is known:
seconds are multiples of `weft.simulator.timing.tasks.TICK`, so that times that are moved are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import final

from weft.errors import InternalError
from weft.simulator.timing.tasks import Tasks
from weft.units import Seconds


@final
@dataclass(frozen=True)
class Times:
    """The begins and ends of tasks, in seconds from the begin of the first step.

    `order` has all of them, as they end.
    """

    starts: Sequence[Seconds]
    ends: Sequence[Seconds]
    order: Sequence[int]

    @property
    def makespan(self) -> Seconds:
        """The end of the last."""
        return max(self.ends, default=Seconds(0.0))


def run(tasks: Tasks, seconds: Sequence[Seconds] | None = None) -> Times:
    """The times of all tasks.

    Args:
        tasks: that run.
        seconds: how long each lasts, instead of what they say; multiples of `TICK`.

    Raises:
        InternalError: when some never begin.
    """
    clock = TaskClock(TaskWeb.of(tasks, seconds))
    clock.begin()
    clock.run()
    if len(clock.order) < len(tasks):
        left = [task for task, need in enumerate(clock.lacks) if need]
        raise InternalError(
            f"{len(left)} tasks wait for each other for ever, the first is {left[0]}"
        )
    return Times(clock.starts, clock.ends, clock.order)


@final
@dataclass(frozen=True, slots=True)
class ClockNote:
    """The state of a clock when nothing has yet happened at a time.

    Attributes:
        time: of what happens next.
        ended: how many tasks have.
        lacks: for each task, how many that it waits for have not ended.
        ready: for each lane, the keys of those that may begin, in order.
        coming: (end, task) of those that run, in order.
    """

    time: Seconds
    ended: int
    lacks: list[int]
    ready: list[list[int]]
    coming: list[tuple[Seconds, int]]

    def moved(self, by: float) -> ClockNote:
        """The same state at another time."""
        coming = [(Seconds(end + by), task) for end, task in self.coming]
        return ClockNote(Seconds(self.time + by), self.ended, self.lacks, self.ready, coming)


@final
class TaskClock:
    """The state of a run.

    Attributes:
        starts, ends: of each task so far.
        lacks, ready, coming: as in a `ClockNote`; heaps.
        order: the tasks that have ended, one after the other.
    """

    __slots__ = ("_stirred", "coming", "ends", "idle", "lacks", "order", "ready", "starts", "web")

    def __init__(self, web: TaskWeb) -> None:
        size = len(web.lasts)
        self.web = web
        self.lacks = web.counts[:]
        self.starts = [Seconds(0.0)] * size
        self.ends = [Seconds(0.0)] * size
        self.ready: list[list[int]] = [[] for _ in range(web.lanes)]
        self.coming: list[tuple[Seconds, int]] = []
        self.idle = [True] * web.lanes
        self.order: list[int] = []
        # Lanes that have got something since they were last asked for a task.
        self._stirred = set[int]()

    def resume(self, note: ClockNote) -> None:
        """Take the state of a note; starts, ends and order are the caller's."""
        self.lacks = note.lacks[:]
        self.ready = [keys[:] for keys in note.ready]
        self.coming = note.coming[:]
        self.idle = [True] * self.web.lanes
        for _, task in note.coming:
            if self.web.lane[task] >= 0:
                self.idle[self.web.lane[task]] = False

    def begin(self) -> None:
        """Begin, at time 0, what waits for nothing; lanes begin once all has ended that lasts no time."""
        web, stirred = self.web, self._stirred
        for task, lacks in enumerate(self.lacks):
            if lacks:
                continue
            lane = web.lane[task]
            if lane >= 0:
                heappush(self.ready[lane], web.keys[task])
                stirred.add(lane)
            else:
                self.starts[task] = Seconds(0.0)
                heappush(self.coming, (web.lasts[task], task))
        if not self.coming or self.coming[0][0] > 0.0:
            self._work(stirred, Seconds(0.0))

    def _work(self, stirred: set[int], now: Seconds) -> None:
        """Begin the first task of each idle lane."""
        ready, idle, lasts, size = self.ready, self.idle, self.web.lasts, len(self.web.lasts)
        for lane in stirred:
            if idle[lane] and ready[lane]:
                task = heappop(ready[lane]) % size
                idle[lane] = False
                self.starts[task] = now
                heappush(self.coming, (Seconds(now + lasts[task]), task))
        stirred.clear()

    def run(self, watch: ClockWatch | None = None) -> tuple[ClockNote, float] | None:
        """Run until nothing more can happen, or until the state is one that is known.

        Args:
            watch: makes notes, and knows some.

        Returns:
            The note whose state was come to, and by how much it is moved in time; None at the end.
        """
        web = self.web
        lasts, follows, lanes, keys = web.lasts, web.follows, web.lane, web.keys
        coming, ready, idle, lacks = self.coming, self.ready, self.idle, self.lacks
        ends, starts, stirred = self.ends, self.starts, self._stirred
        done, work, before = self.order.append, self._work, Seconds(-1.0)
        while coming:
            now = coming[0][0]
            if watch is not None and now > before >= 0.0 and (found := watch.look(self, now)):
                return found
            before = now
            while coming and coming[0][0] == now:
                task = heappop(coming)[1]
                ends[task] = now
                done(task)
                lane = lanes[task]
                if lane >= 0:
                    idle[lane] = True
                    stirred.add(lane)
                for other in follows[task]:
                    lacks[other] = lack = lacks[other] - 1
                    if lack:
                        continue
                    lane = lanes[other]
                    if lane >= 0:
                        heappush(ready[lane], keys[other])
                        stirred.add(lane)
                    else:
                        starts[other] = now
                        heappush(coming, (Seconds(now + lasts[other]), other))
            work(stirred, now)
        return None

    def note(self, now: Seconds) -> ClockNote:
        """A note of the state, when nothing has happened at this time."""
        ready = [sorted(keys) for keys in self.ready]
        return ClockNote(now, len(self.order), self.lacks[:], ready, sorted(self.coming))

    def is_at(self, note: ClockNote, now: Seconds) -> bool:
        """True where the state is that of a note, but for the time."""
        if len(self.coming) != len(note.coming) or self.lacks != note.lacks:
            return False
        by = now - note.time
        running = [(end + by, task) for end, task in note.coming]
        return sorted(self.coming) == running and [sorted(k) for k in self.ready] == note.ready


@final
class ClockWatch:
    """Looks at a clock before anything happens at a time: makes notes, and finds those that are known.

    Args:
        stride: after how many ends a note is made.
        begun: how many tasks have ended at first.
        known: notes by how many tasks have ended.
        after: notes up to this time do not count.

    Attributes:
        notes: made so far.
    """

    __slots__ = ("_after", "_known", "_mark", "_stride", "notes")

    def __init__(
        self,
        stride: int,
        begun: int = 0,
        known: Mapping[int, ClockNote] | None = None,
        after: float = 0.0,
    ) -> None:
        self._stride, self._mark = stride, begun + stride
        self._known: Mapping[int, ClockNote] = known or {}
        self._after = after
        self.notes: list[ClockNote] = []

    def look(self, clock: TaskClock, now: Seconds) -> tuple[ClockNote, float] | None:
        """The known note that the clock has come to, and by how much it is moved."""
        count = len(clock.order)
        note = self._known.get(count)
        if note is not None and note.time > self._after and clock.is_at(note, now):
            return note, now - note.time
        if count >= self._mark:
            self._mark = count + self._stride
            self.notes.append(clock.note(now))
        return None


@final
@dataclass(frozen=True, slots=True)
class TaskWeb:
    """Tasks as a clock reads them; lists that a change may write to.

    Attributes:
        lasts: seconds of each.
        needs, follows: what each waits for, and what waits for it.
        counts: how many tasks each waits for.
        lane: of each, or -1.
        keys: of the tasks of a lane that may begin the least does; a key tells the task.
        lanes: how many there are.
    """

    lasts: list[Seconds]
    needs: list[tuple[int, ...]]
    follows: list[list[int]]
    counts: list[int]
    lane: Sequence[int]
    keys: list[int]
    lanes: int

    @staticmethod
    def of(tasks: Tasks, seconds: Sequence[Seconds] | None = None) -> TaskWeb:
        """The tasks, lasting as long as they say or as is said."""
        size = len(tasks)
        return TaskWeb(
            list(tasks.seconds if seconds is None else seconds),
            list(tasks.needs),
            followers(tasks.needs),
            list(map(len, tasks.needs)),
            tasks.lane,
            [turn * size + task for task, turn in enumerate(tasks.turn)],
            len(tasks.lanes),
        )


def followers(needs: Iterable[Sequence[int]]) -> list[list[int]]:
    """For each task, those that wait for it."""
    every = tuple(needs)
    found: list[list[int]] = [[] for _ in every]
    for task, own in enumerate(every):
        for need in own:
            found[need].append(task)
    return found
