"""The parts of a step: what runs for each micro-batch and what once, and the phases of each stage.

Before: a `Schedule` in the order of the graph. After `gather`: an order in which each part stands
in as few pieces as the data allow, so that it becomes few segments.

A call has a phase of its own, an update is in its target's, a boxing in its reader's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple, final

from weft.compiler.schedule.bucket import Bucket, Schedule, ScheduleItem
from weft.ir.alias import variable_views
from weft.ir.nodes import FORWARD, Phase
from weft.ir.plan import LocalProgram, LocalUpdate, Transfer


@final
class StepPart(NamedTuple):
    """A part of the step: whether it runs for each micro-batch, and its phase."""

    looped: bool
    phase: Phase


_WHOLE = StepPart(False, FORWARD)


@final
class StepParts:
    """Knows the part of every item of a rank's schedule.

    Args:
        program: of the rank.
        schedule: its items.
        staged: true where phases make parts; otherwise all phases are one.
    """

    def __init__(self, program: LocalProgram, schedule: Schedule, staged: bool) -> None:
        self._loop = program.loop
        self.staged = staged
        self._known: dict[int, StepPart] = {}  # by id: the schedule keeps its items
        self._schedule = schedule
        self._phases = {value.name: item.phase for item in schedule for value in item.makes}

    def of(self, item: ScheduleItem) -> StepPart:
        """The part of an item. An update in the loop belongs to what makes its source."""
        if not self._loop and not self.staged:
            return _WHOLE
        found = self._known.get(id(item))
        if found is None:
            found = self._known[id(item)] = self._part(item)
        return found

    def _part(self, item: ScheduleItem) -> StepPart:
        looped = not self._loop.isdisjoint(item.reads) or any(
            value.name in self._loop for value in item.makes
        )
        phase = item.phase
        if isinstance(item, LocalUpdate) and looped:
            phase = self._phases.get(item.source, phase)
        return StepPart(looped, phase if self.staged else FORWARD)

    def comes_again(self, name: str, reader: ScheduleItem) -> bool:
        """True where a value is made anew for each act of its reader."""
        return name in self._loop or not self.of(reader).looped


def gather(program: LocalProgram, schedule: Schedule, parts: StepParts) -> Schedule:
    """The items in an order in which as many of one part as possible stand together.

    Communications come as soon as they may, in their old order on each communicator, so that all
    ranks agree on it; weight gradients come last. In a single stage the loop is cut where a
    reduction of once a step has its last gradient: it starts while the last micro-batch goes on.
    """
    line = _Line(parts, list(schedule))
    line.wire(program)
    return tuple(line.items[number] for number in line.numbers())


@final
@dataclass
class _Line:
    """Items by number, and which of them may come next.

    Attributes:
        missing: for each item, how many of those it waits for have not come.
        followers: for each item, those that wait for it.
        ready: for each part, a heap of the items that may come; communications apart.
        exchanges: heaps of communications, of the loop and of once a step.
    """

    step_parts: StepParts
    items: list[ScheduleItem]
    missing: list[int] = field(default_factory=list)
    followers: list[list[int]] = field(default_factory=list)
    ready: dict[StepPart, list[int]] = field(default_factory=dict)
    exchanges: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))

    def wire(self, program: LocalProgram) -> None:
        """Find out who waits for whom."""
        waits = _waits(program, self.items)
        self.missing = [len(each) for each in waits]
        self.followers = [[] for _ in waits]
        for number, others in enumerate(waits):
            for other in others:
                self.followers[other].append(number)
        for number, count in enumerate(self.missing):
            if not count:
                self._may_come(number)

    def numbers(self) -> Iterator[int]:
        """The items, one after the other."""
        now: StepPart | None = None
        while True:
            looped = now is not None and now.looped
            if self.exchanges[looped]:
                number = heappop(self.exchanges[looped])
            elif self.exchanges[False] and not self.step_parts.staged:
                number = heappop(self.exchanges[False])
            elif now is not None and self.ready.get(now):
                number = heappop(self.ready[now])
            else:
                choice = self._choice()
                if choice is None:
                    return
                now = choice
                continue
            yield number
            for follower in self.followers[number]:
                self.missing[follower] -= 1
                if not self.missing[follower]:
                    self._may_come(follower)

    def _choice(self) -> StepPart | None:
        """The part to go on with: that of the first item which may come, unless it is only a weight's gradient."""
        heads = [
            (part.phase.kind == "weight", heap[0], part)
            for part, heap in self.ready.items()
            if heap
        ]
        for looped, heap in enumerate(self.exchanges):
            heads += [(False, heap[0], StepPart(bool(looped), FORWARD))] if heap else []
        return min(heads)[2] if heads else None

    def _may_come(self, number: int) -> None:
        part = self.step_parts.of(self.items[number])
        if isinstance(self.items[number], Bucket):
            heappush(self.exchanges[part.looped], number)
        else:
            heappush(self.ready.setdefault(part, []), number)


def _waits(program: LocalProgram, items: list[ScheduleItem]) -> list[set[int]]:
    """For each item, those that must come before it: makers, readers of what it overwrites, earlier communications.

    What other ranks make of a transfer may come back in any later communication, so these stay
    behind it.
    """
    bases = variable_views(program)
    makers = {value.name: number for number, item in enumerate(items) for value in item.makes}
    readers: dict[str, list[int]] = {}
    last: dict[int, int] = {}
    sent: list[int] = []
    waits: list[set[int]] = []
    for number, item in enumerate(items):
        found = {makers[name] for name in item.reads if name in makers}
        if isinstance(item, LocalUpdate):
            for name in (item.target, *item.states):
                found.update(readers.get(name, ()))
        if isinstance(item, Bucket):
            communicator = item.collectives[0].communicator
            found.update([last[communicator]] if communicator in last else [])
            last[communicator] = number
            found.update(sent[-1:])
            sent += [number] if _sends(item) else []
        for name in item.reads:
            readers.setdefault(bases.get(name, name), []).append(number)
        waits.append(found - {number})
    return waits


def _sends(item: Bucket) -> bool:
    return any(isinstance(each, Transfer) and each.sends for each in item.collectives)
