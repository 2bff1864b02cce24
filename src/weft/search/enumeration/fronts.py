"""The points that are left, in two fronts: those that people write by hand, and all others."""

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
        state.note_point(point, measures)
        state.tell()

    def _plan_ahead(self, front: Frontier) -> None:
        following = front.next_point(rough=self._state.facts.small is None)
        if following is not None and self._pace.in_time(following):
            self._state.evaluator.ahead(self._state.strategy(following))
