"""From what the queues of a rank recorded to the rows of a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias, final

from weft.actors.dependencies import ActKey, Dependency, dependencies
from weft.compiler.memory.order import moments_of
from weft.compiler.memory.walk import levels
from weft.ir.plan import (
    COMPUTE,
    Actor,
    Collective,
    Communicate,
    Communicator,
    RankPlan,
    Transfer,
)
from weft.runtime.recording import Record, Span
from weft.simulator.clock import Timed
from weft.traces.events import ActSlices, Lines, rows_of
from weft.traces.rows import Arrow, Level, RankTrace, Slice, StepSpan
from weft.units import Seconds


@final
@dataclass(frozen=True)
class Ran:
    """A plan, and when its acts ran."""

    plan: RankPlan
    record: Record

    @cached_property
    def queues(self) -> tuple[str, ...]:
        """The queues of the rank, as rows."""
        return rows_of(self.plan)

    @cached_property
    def begins(self) -> dict[int, int]:
        """The begin of each step, in nanoseconds."""
        return {interval.step: interval.begin for interval in self.record.steps}

    @cached_property
    def numbers(self) -> dict[int, int]:
        """The program's number of each step."""
        return {interval.step: interval.number for interval in self.record.steps}

    @cached_property
    def rows(self) -> dict[str, list[Span]]:
        """The spans of each queue, in order."""
        rows: dict[str, list[Span]] = {queue: [] for queue in self.queues}
        for span in sorted(self.record.spans, key=lambda span: span[1]):
            rows[self.actor(span).queue].append(span)
        return rows

    @cached_property
    def spans(self) -> dict[ActKey, Span]:
        """The span of each act."""
        return {self.key(span): span for span in self.record.spans}

    def actor(self, span: Span) -> Actor:
        """The actor that acted."""
        return self.plan.actors[span[0].actor]

    def key(self, span: Span) -> ActKey:
        """The key of a record among its actor's acts."""
        act = span[0]
        return ActKey(act.actor, act.step * self.actor(span).acts + act.micro)


def rank_trace(
    plan: RankPlan,
    communicators: Sequence[Communicator],
    record: Record,
    lines: Lines,
    waits: Mapping[int, StepSpan],
) -> RankTrace:
    """The rows of a rank.

    Args:
        communicators: of the world.
        record: what its queues did and when.
        lines: the user's line of each value.
        waits: for the batches of steps, by the number of the step; also of steps that are not in the record.
    """
    ran = Ran(plan, record)
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


def _slices(ran: Ran, ranks: dict[str, tuple[int, ...]], lines: Lines) -> Iterator[Slice]:
    """Acts, and what the queues waited for in between."""
    making = ActSlices(ran.plan, lines)
    names: Names = making.names.__getitem__
    for queue, row in ran.rows.items():
        free = 0
        for span in row:
            act, begin, end = span
            actor = ran.actor(span)
            yield from wait(ran, span, max(free, ran.begins[act.step]), names)
            peers: tuple[int, ...] = ()
            if isinstance(actor, Communicate):
                peers = _peers(actor, ranks[queue], ran.plan.rank)
            which = act.actor, act.step, act.micro
            yield making.of(which, (begin, end), ran.numbers[act.step], peers)
            free = end
    yield from last_waits(ran)


def _peers(actor: Communicate, ranks: tuple[int, ...], own: int) -> tuple[int, ...]:
    """The other ranks that a communication may have to wait for."""
    found: set[int] = set()
    for each in actor.collectives:
        match each:
            case Collective():
                found.update(ranks)
            case Transfer(sends=sends, receives=receives):
                found.update(ranks[peer] for peer, _ in (*sends, *receives))
    return tuple(sorted(found - {own}))


def _levels(ran: Ran) -> Iterator[Level]:
    """The memory that the rank held, as the plan says of the order in which its acts ran."""
    for step, start in ran.begins.items():
        spans = [span for span in ran.record.spans if span[0].step == step]
        order = [
            *moments_of(
                Timed(act.actor, act.micro, _after(start, begin), _after(start, end))
                for act, begin, end in spans
            )
        ]
        times = {(act.actor, act.micro): when for act, *when in spans}
        for moment, size in zip(order, levels(ran.plan, order), strict=True):
            begin, end = times[moment.actor, moment.micro]
            yield Level(begin if moment.begins else end, size)


def _after(start: int, time: int) -> Seconds:
    """The seconds between two times in nanoseconds."""
    return Seconds((time - start) / 1e9)


# The name of an actor, by its id.
Names = Callable[[int], str]


def wait(ran: Ran, span: Span, free: int, names: Names) -> Iterator[Slice]:
    """The wait for the last of the dependencies of an act, while its queue was free.

    Args:
        free: when the queue had ended the act before, or the step began, in nanoseconds.
        names: what actors are called.
    """
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


def last_waits(ran: Ran) -> Iterator[Slice]:
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


def arrows(ran: Ran) -> Iterator[Arrow]:
    """The arrows from one queue to another."""
    for span in ran.record.spans:
        target = ran.actor(span).queue
        for need in dependencies(ran.plan, ran.key(span)):
            made = ran.spans.get(need.act)
            if made is None or need.copy or ran.actor(made).queue == target:
                continue
            yield Arrow(need.register, ran.actor(made).queue, target, made[2], span[1])


# When each rank began what it does together with others.
Begun: TypeAlias = "dict[tuple[int, str], int]"


def with_late_ranks(traces: Sequence[RankTrace]) -> tuple[RankTrace, ...]:
    """Mark in all communications how long they waited for other ranks to begin.

    Args:
        traces: of all ranks, on one clock.
    """
    begun = {(t.rank, s.meeting): s.begin for t in traces for s in t.slices if s.meeting}
    return tuple(replace(trace, slices=tuple(_marked(trace.slices, begun))) for trace in traces)


def _marked(slices: Sequence[Slice], begun: Begun) -> Iterator[Slice]:
    for each in slices:
        yield each
        begins = ((begun.get((peer, each.meeting), each.begin), peer) for peer in each.peers)
        # A peer that begins after the end was not waited for: what it gets was put down for it.
        late = [(begin, peer) for begin, peer in begins if each.begin < begin <= each.end]
        if late:
            begin, peer = max(late)
            name = f"waits for rank {peer} to begin"
            yield Slice(each.queue, name, "wait", each.begin, begin, {"rank": peer}, "", (peer,))
