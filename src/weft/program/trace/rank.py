"""From what the queues of a rank recorded to the rows of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from weft.actors.simulate import Timed
from weft.compiler.memory.order import moments_of
from weft.compiler.memory.walk import levels
from weft.ir.plan import Collective, Communicate, Communicator, RankPlan, Transfer
from weft.program.trace.ran import Ran
from weft.program.trace.waits import Names, arrows, last_waits, wait
from weft.runtime.recording import Record, Span
from weft.traces.names import Lines, actor_details, actor_kind, actor_name, places
from weft.traces.rows import Level, RankTrace, Slice, StepSpan
from weft.units import Seconds


def rank_trace(
    plan: RankPlan,
    communicators: Sequence[Communicator],
    record: Record,
    lines: Lines,
    waits: Mapping[int, StepSpan],
) -> RankTrace:
    """The rows of a rank.

    Args:
        plan: what it ran.
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
    called = [actor_name(actor, lines) for actor in ran.plan.actors]
    names: Names = called.__getitem__
    details = [actor_details(actor, lines) for actor in ran.plan.actors]
    place = places(ran.plan.actors)
    for queue, row in ran.rows.items():
        free = 0
        for span in row:
            act, begin, end = span
            actor = ran.actor(span)
            yield from wait(ran, span, max(free, ran.begins[act.step]), names)
            slice_of = partial(Slice, queue, names(act.actor), actor_kind(actor), begin, end)
            known = {**_when(ran, span), **details[act.actor]}
            if isinstance(actor, Communicate):
                meeting = f"{queue} {place[actor.id]} {act.step} {act.micro}"
                yield slice_of(known, meeting, _peers(actor, ranks[queue], ran.plan.rank))
            else:
                yield slice_of(known)
            free = end
    yield from last_waits(ran)


def _when(ran: Ran, span: Span) -> dict[str, str | int]:
    act = span[0]
    when: dict[str, str | int] = {"step": ran.numbers[act.step]}
    return {**when, "micro-batch": act.micro} if ran.actor(span).acts > 1 else when


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
