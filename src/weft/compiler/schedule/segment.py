"""Cut a schedule into actors: maximal runs of local work between communications.

Before: a `Schedule` of one rank. After: actors in the order of their work. A run ends where a
communication can start (its input is there), where the next node waits for a communication that
the run has not waited for yet, and where the next part of the step begins. Gradients of a
micro-batch that were reduced are added up a few reductions later: the backward continues meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import NamedTuple, final

from weft.cached import cached_property
from weft.compiler.context import Context
from weft.compiler.schedule.bucket import sums_of_communicated
from weft.compiler.schedule.draft import Bucket, PlanDraft, Schedule, ScheduleItem
from weft.ir.alias import variable_views
from weft.ir.nodes import FORWARD, OVER_STEP, Phase
from weft.ir.plan import (
    Actor,
    Communicate,
    Compute,
    Feed,
    Fetch,
    Hold,
    LocalCall,
    LocalProgram,
    LocalUpdate,
    Transfer,
)


@final
@dataclass(frozen=True)
class Run:
    """Local work that runs without a stop."""

    nodes: tuple[LocalCall | LocalUpdate, ...]

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Everything that a node reads, in order."""
        names = (name for node in self.nodes for name in sorted(node.reads))
        return tuple(dict.fromkeys(names))

    @cached_property
    def updated(self) -> tuple[str, ...]:
        """The variables that are written in place, in order."""
        updates = (node for node in self.nodes if isinstance(node, LocalUpdate))
        names = (name for node in updates for name in (node.target, *node.states))
        return tuple(dict.fromkeys(names))

    @cached_property
    def makes(self) -> tuple[str, ...]:
        """The fresh values, in order."""
        return tuple(value.name for node in self.nodes for value in node.makes)


def segment(draft: PlanDraft, context: Context) -> PlanDraft:
    """The draft with actors: hold, feed, then segments and communications, then fetch.

    A segment never holds both what runs for each micro-batch and what runs once a step; with
    several stages it keeps to one phase.
    """
    program, staged = draft.program, len(context.stages.placements) > 1
    # Updates last, in the order in which their sources are there: early ones do not wait for late ones.
    made = {value.name: place for place, item in enumerate(draft.schedule) for value in item.makes}
    updates = [item for item in draft.schedule if isinstance(item, LocalUpdate)]
    updates.sort(key=lambda update: made.get(update.source, -1))
    schedule = (*(x for x in draft.schedule if not isinstance(x, LocalUpdate)), *updates)
    parts = StepParts(program, schedule, staged)
    if staged or program.loop:
        schedule = gather(program, schedule, parts)
    inputs = {item.value.name for item in program.inputs}
    cutter = _RunCutter(inputs, parts, sums_of_communicated(schedule))
    for item in schedule:
        cutter.add(item)
    cutter.end()
    updated = {name for run in cutter.work if isinstance(run, Run) for name in run.updated}
    lasting = (item.value.name for item in program.inputs if item.role != "batch")
    fed = [item for item in program.inputs if item.role == "batch"]
    hold = Hold(0, tuple(name for name in lasting if name not in updated))
    feed = Feed(1, tuple(item.key for item in fed), tuple(item.value.name for item in fed))
    queues = {one.id: one.queue for one in draft.communicators}
    work = _work(program, cutter.work, queues, parts)
    keys = tuple(output.key for output in program.outputs)
    names = tuple(output.name for output in program.outputs)
    actors = (hold, feed, *work, Fetch(_FIRST + len(work), keys, names))
    return replace(draft, actors=actors)


# Hold and feed are before the work.
_FIRST = 2
# How many buckets of gradients a backward may be ahead: what they reduce is whole meanwhile. With two ZeRO 3 is up to
# a hundredth slower: gathers are between them (GPT of 12 layers on 8 H100, 4 micro-batches: 48.6 ms; three: 48.3).
UNDER_WAY = 3


@final
@dataclass(slots=True)
class _RunCutter:
    """Collects nodes into runs.

    Attributes:
        outside: values that are there without waiting: inputs, and everything that earlier runs
            made.
        step_parts: which part of the step an item belongs to; a run keeps to one.
        apart: communicated values that are only summed over micro-batches, and all values computed from them.
        sums: calls that make values of `apart`, to be added later, each with the number of reductions before it.
        reductions: the number of buckets so far that bring values of `apart`.
        waited: communicated values that `run` waits for before it starts; all of a bucket come
            together.
        together: for each value of a bucket, all of them.
        made: values that `run` makes.
        joined: those of them that all micro-batches make together: no micro-batch of `run` has them.
    """

    outside: set[str]
    step_parts: StepParts
    apart: frozenset[str]
    work: list[Run | Bucket] = field(default_factory=list)
    sums: list[tuple[int, LocalCall]] = field(default_factory=list)
    reductions: int = 0
    run: list[LocalCall | LocalUpdate] = field(default_factory=list)
    waited: set[str] = field(default_factory=set)
    together: dict[str, frozenset[str]] = field(default_factory=dict)
    made: set[str] = field(default_factory=set)
    joined: set[str] = field(default_factory=set)

    def add(self, item: LocalCall | LocalUpdate | Bucket) -> None:
        if self.sums:
            summed = {value.name for _, call in self.sums for value in call.makes}
            if isinstance(item, Bucket):
                ends = not summed.isdisjoint(item.reads)
            else:
                ends = self.step_parts.of(item) != self.step_parts.of(self.sums[0][1])
            if ends:
                self.end()
        if isinstance(item, Bucket):
            self._add_bucket(item)
        elif isinstance(item, LocalCall) and not self.apart.isdisjoint(v.name for v in item.makes):
            self.sums.append((self.reductions, item))
        else:
            self._add_local(item)

    def _add_bucket(self, item: Bucket) -> None:
        if not self.made.isdisjoint(item.reads):
            self.cut()
        self.work.append(item)
        makes = frozenset(value.name for value in item.makes)
        self.together.update(dict.fromkeys(makes, makes))
        if self.apart.isdisjoint(makes):
            return
        self.reductions += 1
        due = [call for number, call in self.sums if number + UNDER_WAY <= self.reductions]
        del self.sums[: len(due)]
        for call in due:
            self._add_local(call)

    def _add_local(self, item: LocalCall | LocalUpdate) -> None:
        if self.run and self.step_parts.of(item) != self.step_parts.of(self.run[0]):
            self.cut()
        if not self.joined.isdisjoint(item.reads):
            self.cut()
        made, outside, waited = self.made, self.outside, self.waited
        late = [n for n in item.reads if n not in outside and n not in made and n not in waited]
        # Values made once a step are there for all micro-batches but the first: no reason to cut.
        if self.run and any(self.step_parts.comes_again(name, item) for name in late):
            self.cut()
        self.waited.update(*(self.together.get(name, (name,)) for name in late))
        self.run.append(item)
        self.made.update(value.name for value in item.makes)
        if isinstance(item, LocalCall) and item.op in OVER_STEP:
            self.joined.update(value.name for value in item.makes)

    def end(self) -> None:
        """End the run that grows, and add up what is still to come."""
        self.cut()
        due, self.sums = self.sums, []
        for _, call in due:
            self._add_local(call)
        self.cut()

    def cut(self) -> None:
        """End the run that grows."""
        if not self.run:
            return
        self.work.append(Run(tuple(self.run)))
        self.outside |= self.made | self.waited
        self.run, self.waited, self.made, self.joined = [], set(), set(), set()


def _work(
    program: LocalProgram,
    work: Sequence[Run | Bucket],
    queues: Mapping[int, str],
    parts: StepParts,
) -> list[Actor]:
    bases = variable_views(program)
    readers: dict[str, set[int]] = {output.name: {-1} for output in program.outputs}
    for number, item in enumerate(work, _FIRST):
        for name in item.reads:
            readers.setdefault(name, set()).add(number)
    actors: list[Actor] = []
    for number, item in enumerate(work, _FIRST):
        part = parts.of(item if isinstance(item, Bucket) else item.nodes[0])
        acts, phase = program.micro_batches if part.looped else 1, part.phase
        if isinstance(item, Bucket):
            queue = queues[item.collectives[0].communicator]
            actors.append(Communicate(number, item.collectives, queue, acts, phase=phase))
            continue
        # A reader of a variable's view reads the variable: its update must wait.
        views = (bases[name] for name in item.reads if name in bases)
        inside = {*item.makes, *item.updated}
        reads = tuple(name for name in dict.fromkeys((*item.reads, *views)) if name not in inside)
        leaving = tuple(name for name in item.makes if readers.get(name, set()) - {number})
        made = (*leaving, *item.updated)
        actors.append(Compute(number, item.nodes, reads, made, acts=acts, phase=phase))
    return actors


# The parts of a step: what runs for each micro-batch and what once, and the phases of each stage.
#
# Before: a `Schedule` in the order of the graph. After `gather`: an order in which each part stands
# in as few pieces as the data allow, so that it becomes few segments.
#
# A call has a phase of its own, an update is in its target's, a boxing in its reader's.


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
        staged: true if phases make parts; otherwise all phases are one.
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
            looped = not self._loop.isdisjoint(item.reads) or any(
                value.name in self._loop for value in item.makes
            )
            phase = item.phase
            if isinstance(item, LocalUpdate) and looped:
                phase = self._phases.get(item.source, phase)
            part = StepPart(looped, phase if self.staged else FORWARD)
            found = self._known[id(item)] = part
        return found

    def comes_again(self, name: str, reader: ScheduleItem) -> bool:
        """True if a value is made again for each act of its reader."""
        return name in self._loop or not self.of(reader).looped


def gather(program: LocalProgram, schedule: Schedule, parts: StepParts) -> Schedule:
    """The items in an order that keeps items of one part together where possible.

    Communications come as soon as they may, in their old order on each communicator, so that all
    ranks agree on it; weight gradients come last. In a single stage the loop is cut where a
    reduction of once a step has its last gradient: it starts while the last micro-batch continues.
    """
    line = _Line(parts, list(schedule))
    line.wire(program)
    return tuple(line.items[number] for number in line.numbers())


@final
@dataclass(slots=True)
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
                # Go on with the part of the first item which may come, unless it is only a weight's gradient.
                heads = [
                    (part.phase.kind == "weight", heap[0], part)
                    for part, heap in self.ready.items()
                    if heap
                ]
                for loops, heap in enumerate(self.exchanges):
                    heads += [(False, heap[0], StepPart(bool(loops), FORWARD))] if heap else []
                if not heads:
                    return
                now = min(heads)[2]
                continue
            yield number
            for follower in self.followers[number]:
                self.missing[follower] -= 1
                if not self.missing[follower]:
                    self._may_come(follower)

    def _may_come(self, number: int) -> None:
        part = self.step_parts.of(self.items[number])
        if isinstance(self.items[number], Bucket):
            heappush(self.exchanges[part.looped], number)
        else:
            heappush(self.ready.setdefault(part, []), number)


def _waits(program: LocalProgram, items: list[ScheduleItem]) -> list[set[int]]:
    """For each item, those that must come before it: makers, readers of what it overwrites, earlier communications.

    Another rank may send the result of a transfer back in any later communication, so later communications stay
    after it.
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
            if any(isinstance(each, Transfer) and each.sends for each in item.collectives):
                sent.append(number)
        for name in item.reads:
            readers.setdefault(bases.get(name, name), []).append(number)
        waits.append(found - {number})
    return waits
