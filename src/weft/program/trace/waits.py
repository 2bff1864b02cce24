"""Waits of a queue between its acts: for others' queues, or in a communication for the rank that begins last."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from weft.actors.dependencies import Dependency
from weft.ir.plan import COMPUTE
from weft.program.trace.ran import Ran
from weft.runtime.recording import Span
from weft.traces.rows import Arrow, RankTrace, Slice

# The name of an actor, by its id.
Names = Callable[[int], str]


def wait(ran: Ran, span: Span, free: int, names: Names) -> Iterator[Slice]:
    """The wait for the last of the dependencies of an act, while its queue was free.

    Args:
        ran: what ran on the rank.
        span: of the act.
        free: when the queue had ended the act before, or the step began, in nanoseconds.
        names: what actors are called.
    """
    late: tuple[int, Dependency] | None = None
    for need in ran.dependencies.of(ran.key(span)):
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
        for need in ran.dependencies.of(ran.key(span)):
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
