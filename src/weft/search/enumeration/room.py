"""The points that are left, in two fronts; and tight memory: which points are the better beginning then."""

from __future__ import annotations

from math import inf
from typing import final

from weft.search.evaluation.measures import Measures
from weft.search.order.frontier import Frontier
from weft.search.pace import Pace
from weft.search.space.point import Point
from weft.search.space.points import Points
from weft.search.state import SearchState
from weft.units import Seconds

# The limit of memory binds where the best takes so many times as long as without it: while there is time for looks, and
# where there is none, or points by hand are done.
_BINDS, _BINDS_AT_ONCE = 1.05, 1.01
# Seconds that differ by less than so many times are about the same.
ABOUT = 1.25


@final
class Room:
    """Says of the points of a search where memory is tight."""

    def __init__(self, state: SearchState) -> None:
        self._state, self._pace = state, Pace(state)
        self._facts, self._estimates = state.facts, state.estimates

    def quickest_lacks_room(self) -> bool:
        """True where the quickest point by hand, if memory were no matter, should lack room."""
        quickest = self._estimates.quickest(self._state.by_hand)
        return quickest is not None and not self._estimates.may_have_room(quickest[0])

    def is_crowded(self, seconds: Seconds, times: float = _BINDS) -> bool:
        """True where the quickest point by hand would be so many times as fast, if memory were no matter."""
        quickest = self._estimates.quickest(self._state.by_hand)
        return quickest is not None and times * quickest[1] < seconds

    def lacks_room(self, front: Frontier) -> bool:
        """True where nothing fits so far, none of these points should have room, and one of the others may."""
        other = self._other(front)
        return self._state.best is None and not front.has_room() and other.has_room()

    def known_elsewhere(self, front: Frontier) -> bool:
        """True where a point of the other front was looked at that has room, also where its plan may end late."""
        return self._other(front).known(self._pace.in_time) is not None

    def _other(self, front: Frontier) -> Frontier:
        by_hand, others = self._state.fronts
        return others if front is by_hand else by_hand

    def waits(self, front: Frontier, point: Point, seconds: Seconds) -> bool:
        """True where nothing fits so far, and others are the better beginning than a point that takes so many seconds.

        They may have room, and these not; or one that was looked at, or of which blocks run again, is quicker than
        those by hand that have it.
        """
        by_hand, others = self._state.fronts
        if self._state.best is not None:
            return False
        if not self._estimates.may_have_room(point):
            return self.lacks_room(front)
        times = _BINDS if self._pace.may_look() else _BINDS_AT_ONCE
        if front is not by_hand or not self.is_crowded(seconds, times):
            return False
        fewer = self.with_blocks_again() if self._pace.may_look_to_the_end() else None
        if fewer is not None and self._estimates.seconds(fewer) < seconds:
            return True
        known = others.known(self._pace.in_time)
        return known is not None and ABOUT * self._estimates.seconds(known) < seconds

    def safer(self, front: Frontier, point: Point) -> tuple[Frontier, Point] | None:
        """Of points that were looked at the quickest with room, in place of one that may lack it, or is far slower.

        With the front that it is in. Where something fits, only one of the same front that is far quicker than that, in
        place of one that may lack room: there may be no time for both.
        """
        state, estimates, in_time = self._state, self._estimates, self._pace.in_time
        if not estimates.looked_at(point) or (state.best and estimates.has_room(point)):
            return None
        fronts = (front,) if state.best else state.fronts
        known = ((each, each.known(in_time)) for each in fronts)
        found = [(own, each) for own, each in known if each is not None and in_time(each)]
        if not found:
            return None
        own, quickest = min(found, key=lambda each: estimates.seconds(each[1]))
        seconds = ABOUT * estimates.seconds(quickest)
        if state.best:
            wanted = seconds < state.quickest
        else:
            wanted = seconds < estimates.seconds(point) or not estimates.has_room(point)
        return (own, quickest) if wanted else None

    def with_blocks_again(self) -> Point | None:
        """Of data parallel with blocks that run again the quickest; None where small steps do not say what it takes.

        Those are looked at that should be the quickest by what the looks before said, while there is time.
        """
        if self._facts.small is None:
            return None
        again, found = self.blocks_again(), dict[Point, Seconds]()
        while len(again) and (not found or self._pace.may_look()):
            point = again.point(int(self._estimates.rough(again).argmin()))
            if point in found or not self._pace.looks_in_time(point):
                break
            found[point] = self._estimates.seconds(point)
        return min(found, key=lambda point: found[point], default=None)

    def blocks_again(self) -> Points:
        """The points that are left of data parallel all of whose blocks run again."""
        points = self._state.fronts[1].points
        count = self._facts.blocks.count if self._facts.blocks is not None else 0
        flat = (points.stages == 1) & (points.tensor == 1) & (points.offload == 0)
        return points.where(flat & (points.recompute == count) & (count > 0))

    def others_are_better(self) -> bool:
        """True where points that nobody writes by hand should be quicker than moves from the best lead to.

        Those by hand that would be quicker lack room; or one of the others that was looked at should be quicker.
        """
        crowded = self.is_crowded(self._state.quickest, _BINDS_AT_ONCE)
        if self._facts.small is None:
            return crowded and self.quickest_lacks_room()
        return crowded or self._knows_quicker()

    def others_are_far_quicker(self) -> bool:
        """True where one of these was looked at that may have room and should be far quicker than the best."""
        known = self._state.fronts[1].known(self._pace.in_time, surely=False)
        return known is not None and ABOUT * self._estimates.seconds(known) < self._state.quickest

    def _knows_quicker(self) -> bool:
        """True where a point that nobody writes by hand was looked at that should be quicker than the best."""
        known = self._state.fronts[1].known(self._pace.in_time)
        return known is not None and self._estimates.seconds(known) < self._state.quickest


SLOWER = "no quicker than the best, whatever their plans"
NO_ROOM = "take more memory than there is, whatever their plans"


@final
class Fronts:
    """Puts points into the fronts of a search, and takes them out where they are planned, or cannot be the best.

    Args:
        state: of the search, which has the fronts.
    """

    def __init__(self, state: SearchState) -> None:
        self._state, self._pace = state, Pace(state)

    def arrange(self, points: Points) -> None:
        """Take the points that may have room: those that people write by hand, and all others."""
        state, floors = self._state, self._state.floors
        by_hand, room = points.where(points.by_hand), floors.may_fit(points)
        state.leave_out(NO_ROOM, int((~room).sum()))
        points = points.where(room)
        least = floors.least(points)
        hands, others = (
            Frontier(points.where(mask), least[mask], state.estimates)
            for mask in (points.by_hand, ~points.by_hand)
        )
        state.arrange(by_hand, Seconds(float(least.min(initial=inf))), (hands, others))

    def of(self, by_hand: bool) -> Frontier:
        """The front of those that people write by hand, or of the others."""
        hands, others = self._state.fronts
        return hands if by_hand else others

    def has_left(self, front: Frontier) -> bool:
        """True where some point may still be quicker than the best; others are counted."""
        if self._state.best is not None:
            self._state.leave_out(SLOWER, front.drop(self._state.quickest))
        return len(front) > 0

    def plan(self, front: Frontier, point: Point) -> None:
        """Plan a point, which is in no front then; other processes plan the next one of a front meanwhile."""
        state = self._state
        for each in state.fronts:
            each.take(point)
        self._plan_ahead(front)
        by_hand = bool(Points.one(point).by_hand[0])
        measures = state.plan(str(point), state.strategy(point), by_hand)
        if isinstance(measures, Measures) and point not in state.points:
            state.estimates.learn_plan(point, measures)
        state.points[point] = measures
        state.tell()

    def _plan_ahead(self, front: Frontier) -> None:
        following = front.next_point(rough=self._state.facts.small is None)
        if following is not None and self._pace.in_time(following):
            self._state.evaluator.ahead(self._state.strategy(following))
