"""Order constraints between acts, so that a run in any order takes no more memory than the plan says.

Threads begin an act when they can, not when the plan's clock says so: a gather may come early, an exchange may end
late, and what they hold then adds up. So every act gets a window around its place in the plan's order, as wide as the
memory below the peak allows, and waits for the acts whose windows end before its own begins.

Why that is enough: take the latest beginning of a window whose act has begun. In the plan's order, acts before that
moment have ended and later ones have not begun, but for those whose windows contain it; what these may hold besides is
part of the level there, which is at most the peak.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

from weft.actors.dependencies import dependencies_in_step
from weft.actors.messages import IssueSlot
from weft.compiler.memory.order import Moment
from weft.compiler.memory.walk import MemoryWalk, VersionStorage
from weft.ir.plan import Communicate, Compute, RankPlan

# The moments by which windows grow on either side, in turns, so that the acts of a place get alike.
_WIDTHS = (2, 8, 32, 128)
_Key: TypeAlias = tuple[int, int]


def order_constraints(plan: RankPlan, order: Sequence[Moment]) -> tuple[IssueSlot, ...]:
    """The acts of one step that take memory, in the order in which they begin in the plan.

    Args:
        order: when its acts begin and end: that for which its peak was told.
    """
    levels, windows = _windows(plan, order)
    before, after = _neighbours(plan, windows)
    peak = max(levels, default=0)
    for width in _WIDTHS:
        for one, others in zip(windows, before, strict=True):
            one.widen_down(levels, peak, width, [windows[each].first for each in others])
        for number in sorted(range(len(windows)), key=lambda each: -windows[each].end):
            one = windows[number]
            one.widen_up(levels, peak, width, [windows[each].last for each in after[number]])
    return _turns(windows, before)


@final
@dataclass(slots=True)
class _Window:
    """The moments of an act, by their places in the plan's order.

    Attributes:
        actor, micro: the act.
        begin, end: in the plan's order.
        first: from here on it may begin.
        last: by then it must have ended.
        early: the bytes that it takes when it begins before its time.
        late: the bytes that are there when it has not ended in time.
        later: (moment, bytes) of what it reads and others are the last to read; these count from there on.
    """

    actor: int
    micro: int
    begin: int
    early: int
    end: int = 0
    first: int = 0
    last: int = 0
    late: int = 0
    later: list[tuple[int, int]] = field(default_factory=list)

    def widen_down(self, levels: list[int], peak: int, width: int, before: Iterable[int]) -> None:
        """Begin as early as memory allows, after those that come before."""
        limit = max(self.begin - width, max(before, default=-1) + 1)
        while self.first > limit and levels[self.first - 1] + self.early <= peak:
            self.first -= 1
            levels[self.first] += self.early

    def widen_up(self, levels: list[int], peak: int, width: int, after: Iterable[int]) -> None:
        """End as late as memory allows, before those that come after."""
        limit = min(self.end + width, min(after, default=len(levels)) - 1)
        while self.last < limit:
            size = self.late + sum(each for moment, each in self.later if moment <= self.last)
            if levels[self.last] + size > peak:
                return
            levels[self.last] += size
            self.last += 1


def _windows(plan: RankPlan, order: Sequence[Moment]) -> tuple[list[int], list[_Window]]:
    walk = MemoryWalk(plan)
    levels: list[int] = []
    found: dict[_Key, _Window] = {}
    reads: dict[_Key, dict[str, VersionStorage]] = {}
    gone: dict[VersionStorage, int] = {}
    for place, moment in enumerate(order):
        key, before = (moment.actor, moment.micro), walk.total()
        if moment.begins:
            read = reads[key] = walk.reads(*key)
            walk.take(moment)
            given = (name for each in walk.running[moment.actor].taken for name in each.names)
            gone.update({read[name]: place for name in given})
            early = walk.total() - before + walk.saved(moment.actor)
            found[key] = _Window(*key, place, early, first=place)
        else:
            walk.take(moment)
            for storage in reads[key].values():
                if not storage.users:
                    gone.setdefault(storage, place)
            one = found[key]
            one.end = one.last = place
            one.late = max(0, before - walk.total())
        levels.append(walk.total())
    for key, one in found.items():
        ends = ((gone.get(each, -1), each.bytes) for each in set(reads[key].values()))
        one.later = [(end, size) for end, size in ends if end > one.end]
    work = (Compute, Communicate)
    return levels, [one for one in found.values() if isinstance(plan.actors[one.actor], work)]


def _neighbours(
    plan: RankPlan, windows: Sequence[_Window]
) -> tuple[list[list[int]], list[list[int]]]:
    """For each act, those that come before it in any case, and those that come after: by registers and on its queue."""
    needs = dependencies_in_step(plan)
    number = {(one.actor, one.micro): place for place, one in enumerate(windows)}
    before: list[list[int]] = []
    after: list[list[int]] = [[] for _ in windows]
    latest: dict[str, int] = {}
    for place, one in enumerate(windows):
        queue = plan.actors[one.actor].queue
        found = [number[each] for each in needs[one.actor, one.micro] if each in number]
        if queue in latest:
            found.append(latest[queue])
        latest[queue] = place
        before.append(found)
        for each in found:
            after[each].append(place)
    return before, after


def _turns(windows: Sequence[_Window], before: Sequence[Sequence[int]]) -> tuple[IssueSlot, ...]:
    """The order of ends, and for each act how many of them it waits for: those that it does not come after anyway."""
    ends = sorted(range(len(windows)), key=lambda each: (windows[each].last, each))
    places = {each: place for place, each in enumerate(ends)}
    lasts = [windows[each].last for each in ends]
    # For each act those that come before it in any case, a bit at the place of each end.
    known: list[int] = []
    found = []
    for number, one in enumerate(windows):
        mask = 0
        for each in before[number]:
            mask |= known[each] | 1 << places[each]
        known.append(mask)
        left = ((1 << bisect_right(lasts, one.first)) - 1) & ~mask
        found.append(IssueSlot(one.actor, one.micro, places[number], left.bit_length()))
    return tuple(found)
