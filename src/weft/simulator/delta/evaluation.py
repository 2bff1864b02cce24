"""Evaluation of changes: how long tasks take when a little of them is different, without running all of them again.

The delta simulation of FlexFlow (Jia, Zaharia and Aiken, arXiv 1807.05358, algorithm 2) updates what a change
touches, in the order of time. Here a change is replayed from the last note before the first time at which it
may matter; the replay ends where its state is one that is known. The result is that of a full run, to the bit.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import final

from weft.errors import InternalError
from weft.simulator.timing.clock import ClockNote, ClockWatch, TaskClock, TaskWeb, Times
from weft.simulator.timing.tasks import Tasks, in_ticks
from weft.units import Seconds


@final
@dataclass(frozen=True)
class Change:
    """Some tasks that are to be different.

    Attributes:
        seconds: how long they last.
        needs: the tasks that they wait for: of credits, of the order of a communicator.
        turns: their turns on their lanes.
    """

    seconds: Mapping[int, Seconds] = field(default_factory=dict)
    needs: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    turns: Mapping[int, int] = field(default_factory=dict)

    @property
    def tasks(self) -> set[int]:
        """The tasks that are different."""
        return {*self.seconds, *self.needs, *self.turns}


# So many notes are made in a run: copying one takes as long as running some ten tasks.
NOTES = 24
NEVER = Seconds(float("inf"))
# So many accepted changes can be undone.
UNDONE = 8


@final
@dataclass(frozen=True)
class _Proposal:
    """A change that has been evaluated; `known` is where its run came to a known state, and by how much later."""

    back: Change
    found: Evaluated
    known: tuple[ClockNote, float] | None


@final
class Evaluation:
    """Evaluates changes, one after the other: each is proposed, then accepted or undone.

    Args:
        tasks: as they are at first.
        stride: tasks from a note to the next; 0 for some that suits their number.

    Raises:
        InternalError: when some of the tasks never begin.
    """

    def __init__(self, tasks: Tasks, stride: int = 0) -> None:
        self._tasks = tasks
        self._web = TaskWeb.of(tasks)
        self._stride = stride or max(16, len(tasks) // NOTES)
        self._proposal: _Proposal | None = None
        # The change that leads back from each that was accepted, and what was found before it.
        self._before: deque[tuple[Change, Evaluated]] = deque(maxlen=UNDONE)
        clock = TaskClock(self._web)
        clock.begin()
        watch = ClockWatch(self._stride)
        clock.run(watch)
        self._now = self._all(clock, watch.notes)
        if self._now.makespan == NEVER:
            raise InternalError("some of the tasks wait for each other for ever")
        self._by_count = {note.ended: note for note in self._now.notes}
        self._busy = [0.0] * len(tasks.lanes)
        for task, lane in enumerate(tasks.lane):
            if lane >= 0:
                self._busy[lane] += tasks.seconds[task]

    @property
    def seconds(self) -> Seconds:
        """The makespan without what is proposed."""
        return self._now.makespan

    @property
    def times(self) -> Times:
        """The times of all tasks without what is proposed."""
        return Times(self._now.starts, self._now.ends, self._now.order)

    def needs(self, task: int) -> tuple[int, ...]:
        """The tasks that one waits for, with what is proposed."""
        return self._web.needs[task]

    def bound(self, change: Change) -> Seconds:
        """Seconds that the tasks take at least with a change: those of the busiest lane. Takes no time."""
        more: dict[int, float] = {}
        for task, seconds in change.seconds.items():
            lane = self._tasks.lane[task]
            if lane >= 0:
                more[lane] = more.get(lane, 0.0) + in_ticks(seconds) - self._web.lasts[task]
        busy = (own + more.get(lane, 0.0) for lane, own in enumerate(self._busy))
        return Seconds(max(busy, default=0.0))

    def propose(self, change: Change) -> Seconds:
        """The makespan with a change; infinite where some task never begins.

        Until it is accepted or undone, nothing else can be proposed.

        Raises:
            InternalError: when something else is proposed.
        """
        if self._proposal is not None:
            raise InternalError("a change is proposed already: accept or undo it first")
        first = self._first_time(change)
        back = self._apply(change)
        notes = self._now.notes
        place = bisect_right(notes, first, key=_time) - 1
        clock = self._resumed(notes[place] if place >= 0 else None, change)
        starts = self._now.starts
        last = max((starts[task] for task in change.tasks), default=Seconds(0.0))
        watch = ClockWatch(self._stride, len(clock.order), self._by_count, last)
        known = clock.run(watch)
        made = [*notes[: place + 1], *watch.notes]
        found = self._all(clock, made) if known is None else self._joined(clock, made, *known)
        self._proposal = _Proposal(back, found, known)
        return found.makespan

    def accept(self) -> None:
        """Let what was proposed be so.

        Raises:
            InternalError: when nothing is proposed, or some task would never begin.
        """
        proposal = self._proposal
        if proposal is None or proposal.found.makespan == NEVER:
            raise InternalError("there is no change that could be accepted")
        if proposal.known is not None:
            note, by = proposal.known
            later = self._now.notes[bisect_right(self._now.notes, note.ended - 1, key=_ended) :]
            proposal.found.notes.extend(each.moved(by) if by else each for each in later)
        self._before.append((proposal.back, self._now))
        self._take(with_lacks(proposal.found, self._web, proposal.back.needs))

    def undo(self) -> None:
        """Forget what is proposed; if nothing is, what was accepted last, of the last `UNDONE`.

        Raises:
            InternalError: when there is nothing to undo.
        """
        if self._proposal is not None:
            self._apply(self._proposal.back)
            self._proposal = None
            return
        if not self._before:
            raise InternalError("there is no change to undo")
        back, found = self._before.pop()
        self._apply(back)
        self._take(found)

    def _take(self, found: Evaluated) -> None:
        self._proposal, self._now = None, found
        self._by_count = {note.ended: note for note in found.notes}

    def _first_time(self, change: Change) -> float:
        """The first time at which a change may matter: the state before is that without it."""
        ends, starts, needs = self._now.ends, self._now.starts, self._web.needs
        first = [starts[task] for task in change.seconds]
        for task in change.turns:
            first.append(max((ends[need] for need in needs[task]), default=Seconds(0.0)))
        for task, own in change.needs.items():
            ready = max((ends[need] for need in own), default=Seconds(0.0))
            first.append(min(starts[task], ready))
            # It may stand among what its lane can begin until then.
            first.append(max((ends[need] for need in needs[task]), default=Seconds(0.0)))
        return min(first, default=NEVER)

    def _apply(self, change: Change) -> Change:
        """Write a change into the web; returns the one that leads back."""
        web, size = self._web, len(self._tasks)
        back = Change(
            {task: web.lasts[task] for task in change.seconds},
            {task: web.needs[task] for task in change.needs},
            {task: web.keys[task] // size for task in change.turns},
        )
        for task, seconds in change.seconds.items():
            lasts, lane = in_ticks(seconds), web.lane[task]
            if lane >= 0:
                self._busy[lane] += lasts - web.lasts[task]
            web.lasts[task] = lasts
        for task, turn in change.turns.items():
            web.keys[task] = turn * size + task
        for task, needs in change.needs.items():
            for need in set(web.needs[task]).difference(needs):
                web.follows[need].remove(task)
            for need in set(needs).difference(web.needs[task]):
                web.follows[need].append(task)
            web.needs[task], web.counts[task] = needs, len(needs)
        return back

    def _resumed(self, note: ClockNote | None, change: Change) -> TaskClock:
        """A clock with the state of a note and the change; at time 0 without a note. Times are the known ones."""
        clock, now = TaskClock(self._web), self._now
        clock.starts, clock.ends = now.starts[:], now.ends[:]
        if note is None:
            clock.begin()
            return clock
        clock.resume(note)
        clock.order = now.order[: note.ended]
        for task, needs in change.needs.items():
            clock.lacks[task] = sum(now.ends[need] >= note.time for need in needs)
        return clock

    def _all(self, clock: TaskClock, notes: list[ClockNote]) -> Evaluated:
        """The result of a run that has come to its end."""
        ended = len(clock.order) == len(self._tasks)
        makespan = (
            (clock.ends[clock.order[-1]] if clock.order else Seconds(0.0)) if ended else NEVER
        )
        return Evaluated(clock.starts, clock.ends, clock.order, notes, makespan)

    def _joined(
        self, clock: TaskClock, notes: list[ClockNote], note: ClockNote, by: float
    ) -> Evaluated:
        """The result of a run that came to a known state: the rest is as it was, so much later."""
        now = self._now
        rest = now.order[note.ended :]
        if by:
            running = {task for _, task in note.coming}
            for task in rest:
                clock.ends[task] = Seconds(now.ends[task] + by)
                if task not in running:
                    clock.starts[task] = Seconds(now.starts[task] + by)
        clock.order.extend(rest)
        makespan = Seconds(now.makespan + by)
        return Evaluated(clock.starts, clock.ends, clock.order, notes, makespan)


def _time(note: ClockNote) -> float:
    return note.time


def _ended(note: ClockNote) -> int:
    return note.ended


@final
@dataclass(frozen=True)
class Evaluated:
    """The times of all tasks, with the notes of their run; `makespan` is infinite where some never end."""

    starts: list[Seconds]
    ends: list[Seconds]
    order: list[int]
    notes: list[ClockNote]
    makespan: Seconds


def with_lacks(found: Evaluated, web: TaskWeb, changed: Iterable[int]) -> Evaluated:
    """With notes that count what is lacking anew, for tasks that wait for others than they did."""
    tasks = tuple(changed)
    if not tasks:
        return found
    notes = []
    for note in found.notes:
        lacks = note.lacks[:]
        for task in tasks:
            lacks[task] = sum(found.ends[need] >= note.time for need in web.needs[task])
        notes.append(replace(note, lacks=lacks))
    return replace(found, notes=notes)
