"""Points of the space, planned one after the other, those first that should be the quickest."""

from __future__ import annotations

from dataclasses import replace
from typing import final

from weft.search.enumeration.room import Fronts, Room
from weft.search.evaluation.measures import Measures
from weft.search.order.frontier import Frontier
from weft.search.order.rough import BY_ITS_PLAN
from weft.search.pace import Pace
from weft.search.space.point import Point
from weft.search.state import NO_TIME, SearchState
from weft.units import Seconds

SLOWER_BEFORE = "far slower in the search that this one starts from, with something else fixed"
# Before moves from the best, points are planned that should take so many times as long as it at most: by small steps;
# before these were planned, by rough estimate; and by that where the step has none.
_UNLIKELY, _UNLIKELY_UNSEEN, _UNLIKELY_ROUGH = 1.02, 1.1, 2.0
# So many points that lacked room are planned in the order of seconds; then the one that takes the least memory.
_FAILED = 3
# So many times as long as the best: far slower.
_FAR = 1.1


@final
class Enumeration:
    """Plans points for a search, while its budget lasts."""

    def __init__(self, state: SearchState) -> None:
        self._state, self._pace = state, Pace(state)
        self._fronts, self._room = Fronts(state), Room(state)
        self._estimates = state.estimates
        # Points with fewer blocks that run again that took another's place: once, also where they are not planned.
        self._offered = set[Point]()

    def plan_points(self, by_hand: bool, *, likely: bool) -> None:
        """Plan points, the quickest by estimate first, while the budget lasts.

        Args:
            by_hand: those that people write by hand, or the others.
            likely: only those that should be quicker than the best, where estimates are good.
        """
        front, aside = self._fronts.of(by_hand), dict[Point, Seconds]()
        try:
            while self._fronts.has_left(front) and self._pace.goes_on():
                if likely and (self._is_unlikely(front) or self._room.lacks_room(front)):
                    return
                point = self._next(front, likely)
                if point is None:
                    return
                seconds = self._seconds(point)
                if likely and seconds > self._times(seen=True) * self._state.quickest:
                    aside[point] = seconds
                else:
                    self._plan_next(front, point)
        finally:
            for point, seconds in aside.items():
                front.put_back(point, seconds)

    def _is_unlikely(self, front: Frontier) -> bool:
        """True where the next point, and so all others, should take longer than is planned before moves."""
        return front.next_seconds > self._times(seen=False) * self._state.quickest

    def _times(self, seen: bool) -> float:
        """Times as long as the best that points may take that are planned before moves."""
        if self._state.facts.small is None:
            return _UNLIKELY_ROUGH
        return _UNLIKELY if seen else _UNLIKELY_UNSEEN

    def _next(self, front: Frontier, likely: bool) -> Point | None:
        """The next point; None where no look may be made and something fits, or one was planned and time is up.

        None, too, if `likely` and others are the better beginning.
        """
        pace = self._pace
        surely = self._state.best is None
        point = front.pop(pace.may_look, pace.in_time, pace.affords, pace.looks_in_time, surely)
        if point is None:
            point = self._without_looks(front, likely)
        if point is None:
            return None
        seconds = self._seconds(point)
        if likely and self._room.waits(front, point, seconds):
            front.put_back(point, seconds)
            return None
        if pace.must_plan() and not pace.in_time(point):
            front.put_back(point, seconds)
            point = front.pop_known(pace.in_time) or self._soon_planned(front) or point
        if self._fails():
            front.put_back(point, self._seconds(point))
            return front.pop_of_least_memory()
        return self._with_safer(front, point)

    def _soon_planned(self, front: Frontier) -> Point | None:
        """A point whose plan ends soon: with room if one of the next should have it, else what takes least memory."""
        smallest = None if front.has_room() else front.pop_smallest()
        return smallest or front.pop_quickly_planned()

    def _fails(self) -> bool:
        """True where several points were planned that lack room, and no small steps say which one has it."""
        state = self._state
        return state.best is None and state.facts.small is None and len(state.points) >= _FAILED

    def _with_safer(self, front: Frontier, point: Point) -> Point | None:
        """The point, or one that has room more surely, or is far quicker; None where that is in the other front."""
        safer = self._room.safer(front, point)
        if safer is None:
            return point
        front.put_back(point, self._seconds(point))
        its, other = safer
        if its is not front:
            return None
        front.take(other)
        return other

    def _without_looks(self, front: Frontier, likely: bool) -> Point | None:
        """A point where nothing fits and others cannot be looked at first; None where none may be planned.

        None, too, if `likely` and one of the others is known to have room.
        """
        if self._state.best is not None or not (self._pace.must_plan() or self._pace.may_plan()):
            return None
        return None if likely and self._room.known_elsewhere(front) else self._first(front)

    def _first(self, front: Frontier) -> Point:
        """The next point, before all others were looked at; while time lasts one that has room by small steps.

        Then the one that takes the least memory of those that were looked at and are planned soon.
        """
        point = front.pop_as_it_stands()
        while self._pace.may_look_to_the_end():
            if self._estimates.has_room(point):
                return point
            front.put_back(point, self._estimates.seconds(point))
            if not front.has_room():
                return front.pop_as_it_stands()
            point = front.pop_as_it_stands()
        smallest = front.pop_smallest()
        if smallest is None:
            return point
        front.put_back(point, self._seconds(point))
        return smallest

    def _seconds(self, point: Point) -> Seconds:
        """Seconds by which a point stands in the order; rough ones where there is no time to look at it."""
        if self._may_refine(point):
            return self._estimates.seconds(point)
        return self._estimates.rough_of(point)

    def _may_refine(self, point: Point) -> bool:
        """True where small steps say what a point takes, or there is time for them."""
        return self._estimates.looked_at(point) or self._pace.may_look_to_the_end()

    def _plan_next(self, front: Frontier, point: Point) -> None:
        """Plan a point that came out, or the one with fewer blocks recomputed, if there is time and reason to."""
        planned = self._with_room(front, point) if self._may_refine(point) else point
        # The one with fewer may be no point of the space, and the other went back: only what came out counts.
        came_out = int(planned == point)
        if not self._pace.must_plan() and not self._pace.in_time(planned):
            self._state.leave_out(NO_TIME, came_out)
        elif self._was_slower(planned):
            self._state.leave_out(SLOWER_BEFORE, came_out)
        else:
            self._fronts.plan(front, planned)
            self._look_at_less(planned)

    def _look_at_less(self, point: Point) -> None:
        """Look at a point with blocks that run again, of one that is quicker than the best and lacks little room."""
        state, facts = self._state, self._state.facts
        found, limit = state.points.get(point), state.floors.limit
        if not isinstance(found, Measures) or facts.blocks is None or limit is None:
            return
        lacks_little = (
            limit < found.memory <= BY_ITS_PLAN * limit and found.seconds < state.quickest
        )
        again = replace(point, recompute=facts.blocks.count)
        if lacks_little and not point.recompute + point.offload and self._pace.looks_in_time(again):
            self._fronts.of(by_hand=False).look_at(again)

    def _with_room(self, front: Frontier, point: Point) -> Point:
        """The point, or the one with fewer blocks recomputed where these suffice; the other goes back behind it."""
        fewer = self._estimates.just_enough(point)
        if fewer is None or fewer in self._offered:
            return point
        self._offered.add(fewer)
        front.put_back(point, self._estimates.seconds_as_it_stands(point))
        return fewer

    def _was_slower(self, point: Point) -> bool:
        """True where an earlier search, with something else fixed, found a point far slower than the best is now."""
        state = self._state
        return (
            state.best is not None
            and state.learned.was_slower(point, _FAR * state.quickest)
            and not state.evaluator.knows(state.strategy(point))
        )
