"""The rows of all ranks together: communications wait for the rank that begins last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from weft.program.trace.rows import RankTrace, Slice

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
