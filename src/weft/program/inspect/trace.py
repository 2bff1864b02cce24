"""Trace: when every act of some steps ran, on all ranks and one clock; what queues waited for; where the time went."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter_ns
from types import MappingProxyType
from typing import TypeAlias, final

from weft.actors.dependencies import ActKey, Dependency, dependencies
from weft.atomic_files import write_making_folder
from weft.compiler.memory.order import moments_of
from weft.compiler.memory.walk import levels
from weft.compiler.pipeline import Compiled
from weft.errors import UserError
from weft.ir.plan import (
    COMPUTE,
    Actor,
    Collective,
    Communicate,
    Communicator,
    RankPlan,
    Transfer,
)
from weft.program.data.loading import COPIES, LOAD, LoadingActs
from weft.program.inspect.tables import table, text_of
from weft.runtime.recording import Interval, Record, Span
from weft.runtime.world.world import World
from weft.simulator.clock import Timed
from weft.traces.events import ActSlices, Lines, lines_of, rows_of, trace_content
from weft.traces.rows import Arrow, Level, RankTrace, Slice, StepSpan, TimeParts, parts
from weft.units import Seconds

# The shares of a rank's time that a trace's table shows.
_SHARES = ("step", "compute", "communication", "hidden", "exposed", "late", "idle", "data")


@final
@dataclass(frozen=True)
class Trace:
    """The traces of all ranks for some steps. Prints as a table of where the time went.

    Attributes:
        ranks: the rows of each rank, on one clock.
        batch: the entries of the batch that the steps were planned for.
    """

    ranks: tuple[RankTrace, ...]
    batch: str = ""

    def __iter__(self) -> Iterator[RankTrace]:
        return iter(self.ranks)

    @cached_property
    def parts(self) -> tuple[TimeParts, ...]:
        """The shares of each rank's time, in seconds a step."""
        return tuple(map(parts, self.ranks))

    @property
    def exposed(self) -> Seconds:
        """Seconds a step in which compute queues wait while communicators act: the mean of the ranks."""
        return Seconds(sum(each.exposed for each in self.parts) / len(self.parts))

    def write(self, path: str | Path, predicted: Sequence[RankTrace] = ()) -> None:
        """Write it for ui.perfetto.dev or chrome://tracing, beside `predicted` timelines, in processes of their own.

        Folders that are missing are made. Raises UserError where it cannot be written.
        """
        content = trace_content(self.ranks, predicted, self.batch)
        write_making_folder(path, json.dumps(content), "the timeline")

    def __str__(self) -> str:
        rows = (
            (str(each.rank), *(f"{1000 * getattr(each, share):.3g} ms" for share in _SHARES))
            for each in self.parts
        )
        on = f" on {self.batch}" if self.batch else ""
        columns = ("rank", *("late ranks" if share == "late" else share for share in _SHARES))
        return text_of(table(f"where the time of a step{on} goes", columns, rows))


# For each of some exchanges between all ranks: when a rank entered and left it, on its own clock,
# in nanoseconds.
Visits: TypeAlias = Sequence[tuple[int, int]]


def ahead(own: Visits, first: Visits) -> int:
    """The nanoseconds by which a clock is ahead of the first rank's, computed from common exchanges.

    No rank leaves an exchange before all have entered it, which bounds the difference from both sides. A difference of
    0 is taken where it is possible, since processes of one host share their clock; elsewhere the middle of the bounds.
    """
    pairs = list(zip(own, first, strict=True))
    least = max(entered - left for (entered, _), (_, left) in pairs)
    most = min(left - entered for (_, left), (entered, _) in pairs)
    return 0 if least <= 0 <= most else (least + most) // 2


# Exchanges by which clocks are compared: the fastest of them bound the difference.
_ROUNDS = 5


def gather_trace(
    world: World,
    compiled: Compiled,
    records: Mapping[int, Record],
    waits: Mapping[int, StepSpan],
    loads: Mapping[int, LoadingActs] = MappingProxyType({}),
) -> Trace:
    """Gather the traces of all ranks, with waits for batches and what brought them; every process must call it.

    Raises:
        UserError: when no step has run.
        RankFailure: when another process does not call it in time.
    """
    if not all(record.steps for record in records.values()):
        raise UserError(
            "there is nothing to trace: call step first (one that fails leaves nothing)"
        )
    plans, lines = compiled.plan, lines_of(compiled.graph)
    own = [
        rank_trace(plan, plans.communicators, records[plan.rank], lines, waits)
        for plan in plans.ranks
    ]
    own[0] = with_loading(own[0], loads)
    if not world.several:
        return Trace(with_late_ranks(own))
    visits = []
    for _ in range(_ROUNDS):  # when this process enters and leaves an exchange of all ranks
        entered = perf_counter_ns()
        world.gather(dict.fromkeys(world.ranks, "here"))
        visits.append((entered, perf_counter_ns()))
    texts = world.gather({each.rank: json.dumps([visits, each.text()]) for each in own})
    told: list[tuple[Visits, str]] = [json.loads(text) for text in texts]
    first, _ = told[0]
    traces = [RankTrace.of(text).moved(ahead(theirs, first)) for theirs, text in told]
    return Trace(with_late_ranks(traces))


# The names of the actors of each queue.
_NAMES = {LOAD: "load", COPIES: "copy", COMPUTE: "step"}


def with_loading(trace: RankTrace, loads: Mapping[int, LoadingActs]) -> RankTrace:
    """The trace of a rank with rows for the queues that load and copy, by the acts that brought the batches of steps.

    They are there with the number of the step for which they were, which ran later; in between what the queue waited
    for, such as the copy of a register that a slow step returns late.
    """
    wanted = {each.number for each in trace.steps} & loads.keys()
    queues: dict[str, None] = {}
    slices: list[Slice] = []
    passed: list[Arrow] = []
    # Plans of two loops may be equal, and count their steps each from 0.
    loops: dict[int, dict[int, LoadingActs]] = {}
    for step, acts in loads.items():
        loops.setdefault(id(acts.plan), {})[step] = acts
    for own in loops.values():
        if not own.keys() & wanted:
            continue
        spans = tuple(span for acts in own.values() for span in acts.spans)
        ran = RecordedActs(next(iter(own.values())).plan, Record((), spans))
        # The program's number of each step of the loop.
        steps = {acts.number: step for step, acts in own.items()}
        queues.update(dict.fromkeys(queue for queue in ran.queues if queue in (LOAD, COPIES)))
        slices += (each for each in _loading_slices(ran, steps) if each.details["step"] in wanted)
        read = {span[1] for span in ran.record.spans if steps[span[0].step] in wanted}
        passed += (each for each in arrows(ran) if each.read in read)
    order = [queue for queue in (LOAD, COPIES) if queue in queues]
    return replace(
        trace,
        queues=(*trace.queues, *((queue, ()) for queue in order)),
        slices=(*trace.slices, *sorted(slices, key=lambda s: (order.index(s.queue), s.begin))),
        arrows=(*trace.arrows, *passed),
    )


def _loading_slices(ran: RecordedActs, steps: Mapping[int, int]) -> Iterator[Slice]:
    def name(actor: int) -> str:
        return _NAMES[ran.plan.actors[actor].queue]

    for queue, row in ran.rows.items():
        free: int | None = None
        for span in row if queue in (LOAD, COPIES) else ():
            act, begin, end = span
            when = {"step": steps[act.step]}
            for each in wait(ran, span, begin if free is None else free, name):
                yield each._replace(details={**each.details, **when})
            yield Slice(queue, name(act.actor), "host", begin, end, {"actor": act.actor, **when})
            free = end


@final
@dataclass(frozen=True)
class RecordedActs:
    """A plan, and when its acts ran."""

    plan: RankPlan
    record: Record

    @cached_property
    def queues(self) -> tuple[str, ...]:
        return rows_of(self.plan)

    @cached_property
    def steps(self) -> dict[int, Interval]:
        return {interval.step: interval for interval in self.record.steps}

    @cached_property
    def rows(self) -> dict[str, list[Span]]:
        rows: dict[str, list[Span]] = {queue: [] for queue in self.queues}
        for span in sorted(self.record.spans, key=lambda span: span[1]):
            rows[self.actor(span).queue].append(span)
        return rows

    @cached_property
    def spans(self) -> dict[ActKey, Span]:
        return {self.key(span): span for span in self.record.spans}

    def actor(self, span: Span) -> Actor:
        return self.plan.actors[span[0].actor]

    def key(self, span: Span) -> ActKey:
        act = span[0]
        return ActKey(act.actor, act.step * self.actor(span).acts + act.micro)


def rank_trace(
    plan: RankPlan,
    communicators: Sequence[Communicator],
    record: Record,
    lines: Lines,
    waits: Mapping[int, StepSpan],
) -> RankTrace:
    """The rows of a rank; `lines`: the user's line of each value, `waits`: for batches, by the number of the step."""
    ran = RecordedActs(plan, record)
    ranks = {communicator.queue: communicator.ranks for communicator in communicators}
    slices = [*_slices(ran, ranks, lines)]
    return RankTrace(
        plan.rank,
        tuple((queue, ranks.get(queue, ())) for queue in ran.queues),
        tuple(StepSpan(each.number, each.begin, each.end) for each in record.steps),
        tuple(sorted(slices, key=lambda each: (ran.queues.index(each.queue), each.begin))),
        tuple(arrows(ran)),
        tuple(_levels(ran)),
        tuple(waits[each.number] for each in record.steps if each.number in waits),
    )


def _slices(ran: RecordedActs, ranks: dict[str, tuple[int, ...]], lines: Lines) -> Iterator[Slice]:
    making = ActSlices(ran.plan, lines)
    names: Names = making.names.__getitem__
    for queue, row in ran.rows.items():
        free = 0
        for span in row:
            act, begin, end = span
            actor = ran.actor(span)
            yield from wait(ran, span, max(free, ran.steps[act.step].begin), names)
            peers: tuple[int, ...] = ()
            if isinstance(actor, Communicate):
                peers = _peers(actor, ranks[queue], ran.plan.rank)
            which = act.actor, act.step, act.micro
            yield making.of(which, (begin, end), ran.steps[act.step].number, peers)
            free = end
    yield from last_waits(ran)


def _peers(actor: Communicate, ranks: tuple[int, ...], own: int) -> tuple[int, ...]:
    peers: set[int] = set()
    for each in actor.collectives:
        match each:
            case Collective():
                peers.update(ranks)
            case Transfer(sends=sends, receives=receives):
                peers.update(ranks[peer] for peer, _ in (*sends, *receives))
    return tuple(sorted(peers - {own}))


def _levels(ran: RecordedActs) -> Iterator[Level]:
    """The memory that the rank held, as the plan says of the order in which its acts ran."""
    for step, interval in ran.steps.items():
        times = {
            (act.actor, act.micro): (begin, end)
            for act, begin, end in ran.record.spans
            if act.step == step
        }
        order = [
            *moments_of(
                Timed(
                    *which,
                    Seconds((begin - interval.begin) / 1e9),
                    Seconds((end - interval.begin) / 1e9),
                )
                for which, (begin, end) in times.items()
            )
        ]
        for moment, size in zip(order, levels(ran.plan, order), strict=True):
            begin, end = times[moment.actor, moment.micro]
            yield Level(begin if moment.begins else end, size)


# The name of an actor, by its id.
Names = Callable[[int], str]


def wait(ran: RecordedActs, span: Span, free: int, names: Names) -> Iterator[Slice]:
    """The wait for the last of an act's dependencies, while its queue was free since `free`, in nanoseconds."""
    late: tuple[int, Dependency] | None = None
    for need in dependencies(ran.plan, ran.key(span)):
        other = ran.spans.get(need.act)
        if other is not None and other[2] > (free if late is None else late[0]):
            late = other[2], need
    if late is None:
        return
    end, need = min(late[0], span[1]), late[1]
    other_name = names(need.act.actor)
    what = f"a free copy of {need.register}, read by" if need.copy else f"{need.register} of"
    details: dict[str, str | int] = {
        "register": need.register,
        "actor": need.act.actor,
        "lacks": "a free copy" if need.copy else "a version",
    }
    queue = ran.actor(span).queue
    yield Slice(queue, f"waits for {what} {other_name}", "wait", free, end, details)


def last_waits(ran: RecordedActs) -> Iterator[Slice]:
    """At the end of each step the compute queue waits for the others."""
    for step, begin, end, number in ran.record.steps:
        ends = {
            queue: max((span[2] for span in row if span[0].step == step), default=begin)
            for queue, row in ran.rows.items()
        }
        last = max(ends, key=ends.__getitem__)
        if last != COMPUTE:
            name = f"waits for the end of {last}"
            yield Slice(
                COMPUTE, name, "wait", ends[COMPUTE], min(ends[last], end), {"step": number}
            )


def arrows(ran: RecordedActs) -> Iterator[Arrow]:
    """The arrows from one queue to another."""
    for span in ran.record.spans:
        target = ran.actor(span).queue
        for need in dependencies(ran.plan, ran.key(span)):
            made = ran.spans.get(need.act)
            if made is None or need.copy or ran.actor(made).queue == target:
                continue
            yield Arrow(need.register, ran.actor(made).queue, target, made[2], span[1])


def with_late_ranks(traces: Sequence[RankTrace]) -> tuple[RankTrace, ...]:
    """Mark in all communications, of all ranks on one clock, how long they waited for other ranks to begin."""
    begun = {(t.rank, s.meeting): s.begin for t in traces for s in t.slices if s.meeting}

    def marked(slices: Sequence[Slice]) -> Iterator[Slice]:
        for each in slices:
            yield each
            begins = ((begun.get((peer, each.meeting), each.begin), peer) for peer in each.peers)
            # A peer that begins after the end was not waited for: what it gets was put down for it.
            late = [(begin, peer) for begin, peer in begins if each.begin < begin <= each.end]
            if late:
                begin, peer = max(late)
                name = f"waits for rank {peer} to begin"
                yield each._replace(
                    name=name,
                    kind="wait",
                    end=begin,
                    details={"rank": peer},
                    meeting="",
                    peers=(peer,),
                )

    return tuple(replace(trace, slices=tuple(marked(trace.slices))) for trace in traces)
