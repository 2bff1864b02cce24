"""Find repeated layers in the segments of a rank, and mark where they begin.

Parts that do the same in the same order, such as the layers of a transformer, share one compiled
kernel: compile time grows with the number of distinct layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace

from weft.ir.nodes import Arg, Ref
from weft.ir.plan import Compute, LocalCall, RankPlan
from weft.ops.call import map_argument

# Repeats with fewer calls are taken together until they have as many: what a kernel costs by itself
# is about that of a few small ops, and nothing is fused across its border.
FEWEST = 24
# How many later places with an equal call are tried as the beginning of a second copy.
TRIED = 48


def outline(plan: RankPlan, fewest: int = FEWEST) -> RankPlan:
    """The plan with the places in its segments where parts begin that may each be compiled as one kernel."""
    segments = [actor for actor in plan.actors if isinstance(actor, Compute)]
    calls = [node for one in segments for node in one.nodes if isinstance(node, LocalCall)]
    # Calls are known by identity: equal ones stand in many places.
    begins = {id(calls[place]) for place in repeats(calls, fewest)}
    actors = tuple(
        replace(actor, parts=_places(actor, begins)) if isinstance(actor, Compute) else actor
        for actor in plan.actors
    )
    return replace(plan, actors=actors)


def _places(segment: Compute, begins: Collection[int]) -> tuple[int, ...]:
    """The places of nodes with these ids; a segment begins a part anyway."""
    places = range(1, len(segment.nodes))
    return tuple(place for place in places if id(segment.nodes[place]) in begins)


def repeats(calls: Sequence[LocalCall], fewest: int = FEWEST) -> list[int]:
    """The places before which to cut, so that equal stretches of calls become equal parts.

    Args:
        calls: all local calls of a rank, in the order in which they run.
        fewest: the calls of a part, at least, where repeats are long enough.

    Returns:
        Increasing places inside of the list, where a repeat begins or ends.
    """
    numbers: dict[Hashable, int] = {}
    marks = [numbers.setdefault(_mark(call), len(numbers)) for call in calls]
    later: defaultdict[int, list[int]] = defaultdict(list)
    for place, mark in enumerate(marks):
        later[mark].append(place)
    cuts: list[int] = []
    place = 0
    while place < len(marks):
        period, copies = _repeat(marks, place, later[marks[place]])
        if period * copies < 2 * fewest:
            place += 1
            continue
        together = min(copies, -(-fewest // period))
        end = place + period * copies
        cuts += [*range(place, end, period * together), end]
        place = end
    return [cut for cut in dict.fromkeys(cuts) if 0 < cut < len(calls)]


def _repeat(marks: Sequence[int], place: int, equal: Sequence[int]) -> tuple[int, int]:
    """The (period, copies) of the longest stretch from `place` on that repeats; (1, 1) without one.

    Args:
        marks: of all calls.
        place: where it begins.
        equal: all places of the mark at `place`, increasing.
    """
    best = (1, 1)
    tried = [other - place for other in equal if other > place][:TRIED]
    for period in tried:
        if best[1] > 1 and (period % best[0] == 0 or 2 * period > len(marks) - place):
            continue
        copies = 1 + _matching(marks, place, period) // period
        if copies > 1 and period * copies > best[0] * best[1]:
            best = (period, copies)
    return best


def _matching(marks: Sequence[int], place: int, period: int) -> int:
    """The number of marks from `place` on that equal the ones `period` later."""
    end = place
    while end + period < len(marks) and marks[end] == marks[end + period]:
        end += 1
    return end - place


def _mark(call: LocalCall) -> Hashable:
    """The facts that two calls have in common whatever they read: op, constants, shapes and dtypes of results."""
    made = tuple(value and (value.shape, value.dtype) for value in call.outputs)
    return (call.op, _nameless(call.args), _nameless(call.kwargs), made)


def _nameless(arg: Arg) -> Hashable:
    return _typed(map_argument(lambda leaf: Ref if isinstance(leaf, Ref) else leaf, arg))


def _typed(arg: object) -> Hashable:
    """An argument that equals no other of another type: 1, 1.0 and True differ."""
    return tuple(map(_typed, arg)) if isinstance(arg, tuple) else (type(arg), arg)
