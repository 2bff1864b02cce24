"""Points of the space, planned one after the other, those first that should be the quickest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf, log
from typing import final

import numpy as np

from weft.search.bounds.additive import additive_part
from weft.search.evaluation.measures import Measures, key_of
from weft.search.order.frontier import Frontier
from weft.search.outcome.why_not import kinds_of
from weft.search.pace import Pace
from weft.search.space.fixed import fits
from weft.search.space.point import Point
from weft.search.space.points import Mask, Points
from weft.search.state import ADDED_UP, NO_TIME, SearchState
from weft.units import Seconds

SLOWER = "no quicker than the best, whatever their plans"
NO_ROOM = "take more memory than there is, whatever their plans"
SLOWER_BEFORE = "far slower in the search that this one starts from, with something else fixed"
# Before moves from the best, points are planned that should take so many times as long as it at most: by small steps;
# before these were planned, by floors; and by floors where the step has none.
_UNLIKELY, _UNLIKELY_UNSEEN, _UNLIKELY_ROUGH = 1.02, 1.1, 2.0
# So many times as long as the best: far slower.
_FAR = 1.1
# The limit of memory binds where the best takes so many times as long as without it: while there is time for looks, and
# where there is none, or points by hand are done.
_BINDS, _BINDS_AT_ONCE = 1.05, 1.01
# The part of the time that is left which the cheapest layouts of data parallel may take.
_CHEAPEST = 0.4
# So many points that take little memory are looked at before others, until one has room.
_SMALLEST = 3
# Seconds that differ by less than so many times are about the same.
_ABOUT = 1.25


@final
class Enumeration:
    """Plans points for a search, while its budget lasts.

    Args:
        state: of the search.
    """

    def __init__(self, state: SearchState) -> None:
        self._state, self._pace = state, Pace(state)
        self._evaluator, self._floors, self._facts = state.evaluator, state.floors, state.facts
        self._estimates, self._learned = state.estimates, state.learned
        # Points with fewer blocks that run again that took another's place: once, also where they are not planned.
        self._offered = set[Point]()

    def arrange(self, points: Points) -> None:
        """Take the points that may have room: those that people write by hand, and all others."""
        self._state.by_hand = points.where(points.by_hand)
        room = self._rooms(points)
        self._state.skipped[NO_ROOM] += int((~room).sum())
        points = points.where(room)
        least = self._floors.least(points)
        self._state.least = Seconds(min(self._state.least, float(least.min(initial=inf))))
        self._state.fronts = [
            Frontier(points.where(mask), least[mask], self._estimates)
            for mask in (points.by_hand, ~points.by_hand)
        ]

    def _rooms(self, points: Points) -> Mask:
        limit = self._floors.limit
        return self._floors.memory(points) <= (inf if limit is None else limit)

    def plan_points(self, by_hand: bool, *, likely: bool) -> None:
        """Plan points, the quickest by estimate first, while the budget lasts.

        Args:
            by_hand: those that people write by hand, or the others.
            likely: only those that should be quicker than the best, where estimates are good.
        """
        hands, others = self._state.fronts
        front = hands if by_hand else others
        aside = dict[Point, Seconds]()
        try:
            while self._has_left(front) and self._pace.goes_on():
                if likely and (self._is_unlikely(front) or self._lacks_room(front)):
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

    def _plan_next(self, front: Frontier, point: Point) -> None:
        """Plan a point that came out, or the one with fewer blocks recomputed, if there is time and reason to."""
        looked_at = self._estimates.looked_at(point)
        planned = (
            self._with_room(front, point)
            if looked_at or self._pace.may_look_to_the_end()
            else point
        )
        # The one with fewer may be no point of the space, and the other went back: only what came out counts.
        came_out = int(planned == point)
        if not self._pace.must_plan() and not self._pace.in_time(planned):
            self._state.skipped[NO_TIME] += came_out
        elif self._was_slower(planned):
            self._state.skipped[SLOWER_BEFORE] += came_out
        else:
            self._plan_point(front, planned)

    def _seconds(self, point: Point) -> Seconds:
        """Seconds by which a point stands in the order; rough ones where there is no time to look at it."""
        if self._estimates.looked_at(point) or self._pace.may_look_to_the_end():
            return self._estimates.seconds(point)
        return self._estimates.rough_of(point)

    def _has_left(self, front: Frontier) -> bool:
        """True where some point may still be quicker than the best; others are counted."""
        if self._state.best is not None:
            self._state.skipped[SLOWER] += front.drop(self._state.quickest)
        return len(front) > 0

    def _next(self, front: Frontier, likely: bool) -> Point | None:
        """The next point; None where no look may be made and something fits, or one was planned and time is up.

        None, too, if `likely` and others are the better beginning.
        """
        point = front.pop(self._pace.may_look, self._pace.in_time, self._pace.affords)
        if point is None:
            if self._state.best is not None or not (
                self._pace.must_plan() or self._pace.may_plan()
            ):
                return None
            if likely and self._known_elsewhere(front):
                return None
            point = self._first(front)
        seconds = self._seconds(point)
        if likely and self._waits(front, point, seconds):
            front.put_back(point, seconds)
            return None
        if self._pace.must_plan() and not self._pace.in_time(point):
            front.put_back(point, seconds)
            point = front.pop_known(self._pace.in_time) or point
        return point

    def _waits(self, front: Frontier, point: Point, seconds: Seconds) -> bool:
        """True where nothing fits so far, and others are the better beginning than a point that takes so many seconds.

        They may have room, and these not; or one that was looked at, or of which blocks run again, is quicker than
        those by hand that have it.
        """
        by_hand, others = self._state.fronts
        if self._state.best is not None:
            return False
        if not self._estimates.may_have_room(point):
            return self._lacks_room(front)
        times = _BINDS if self._pace.may_look() else _BINDS_AT_ONCE
        if front is not by_hand or not self.is_crowded(seconds, times):
            return False
        fewer = self._with_blocks_again(others) if self._pace.may_look_to_the_end() else None
        if fewer is not None and self._estimates.seconds(fewer) < seconds:
            return True
        known = others.known(self._pace.in_time)
        return known is not None and _ABOUT * self._estimates.seconds(known) < seconds

    def _with_blocks_again(self, others: Frontier) -> Point | None:
        """Of data parallel with blocks that run again the quickest; None where small steps do not say what it takes.

        Those are looked at that should be the quickest by what the looks before said, while there is time.
        """
        if self._facts.small is None:
            return None
        again, found = self._again(others.points), dict[Point, Seconds]()
        while len(again) and (not found or self._pace.may_look()):
            point = again.point(int(self._estimates.rough(again).argmin()))
            if point in found:
                break
            found[point] = self._estimates.seconds(point)
        return min(found, key=lambda point: found[point], default=None)

    def _again(self, points: Points) -> Points:
        """Those of data parallel all of whose blocks run again."""
        count = self._facts.blocks.count if self._facts.blocks is not None else 0
        flat = (points.stages == 1) & (points.tensor == 1) & (points.offload == 0)
        return points.where(flat & (points.recompute == count) & (count > 0))

    def _smallest(self) -> Points:
        """Of these on all ranks with ZeRO 3."""
        again = self._again(self._state.fronts[1].points)
        return again.where((again.zero == 3) & (again.data == again.data.max(initial=0)))

    def _fewest_micro_batches(self, points: Points) -> Point | None:
        """The one with the fewest micro-batches that should have room, or with the most; None without any."""
        order = np.argsort(points.micro_batches, kind="stable") if len(points) else ()
        each = [points.point(int(number)) for number in order]
        small = (point for point in each if self._estimates.may_have_room(point))
        return next(small, each[-1] if each else None)

    def _known_elsewhere(self, front: Frontier) -> bool:
        """True where a point of the other front was looked at that has room and can be planned in time."""
        point = self._other(front).known(self._pace.in_time)
        return point is not None and self._pace.in_time(point)

    def _other(self, front: Frontier) -> Frontier:
        by_hand, others = self._state.fronts
        return others if front is by_hand else by_hand

    def _lacks_room(self, front: Frontier) -> bool:
        """True where nothing fits so far, none of these points should have room, and one of the others may."""
        other = self._other(front)
        return self._state.best is None and not front.has_room() and other.has_room()

    def others_are_better(self) -> bool:
        """True where points that nobody writes by hand should be quicker than moves from the best lead to.

        Those by hand that would be quicker lack room; or one of the others that was looked at should be quicker.
        """
        crowded = self.is_crowded(self._state.quickest, _BINDS_AT_ONCE)
        if self._facts.small is None:
            return crowded and self._quickest_lacks_room()
        return crowded or self._knows_quicker()

    def _knows_quicker(self) -> bool:
        """True where a point that nobody writes by hand was looked at that should be quicker than the best."""
        known = self._state.fronts[1].known(self._pace.in_time)
        return known is not None and self._estimates.seconds(known) < self._state.quickest

    def is_crowded(self, seconds: Seconds, times: float = _BINDS) -> bool:
        """True where the quickest point by hand would be so many times as fast, if memory were no matter."""
        quickest = self._estimates.quickest(self._state.by_hand)
        return quickest is not None and times * quickest[1] < seconds

    def _first(self, front: Frontier) -> Point:
        """The next point, before all others were looked at; while time lasts one that has room by small steps.

        Then the one that takes the least memory of those that were looked at.
        """
        point = front.pop_as_it_stands()
        while self._pace.may_look_to_the_end():
            if self._estimates.refined(point) is None or self._estimates.has_room(point):
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

    def _with_room(self, front: Frontier, point: Point) -> Point:
        """The point, or the one with fewer blocks recomputed where these suffice; the other goes back behind it."""
        fewer = self._estimates.just_enough(point)
        if fewer is None or fewer in self._offered:
            return point
        self._offered.add(fewer)
        front.put_back(point, self._estimates.seconds_as_it_stands(point))
        return fewer

    def look_at_kinds(self) -> None:
        """Look at the best, by rough estimate, of each kind of strategy that people write by hand.

        By small steps where there are any, else by a plan of the whole. Where the quickest lacks room, at the one with
        blocks that run again, too.
        """
        front = self._state.fronts[0]
        plan = took = 0.0
        self.look_at_smallest()
        for point in self._quick_and_cheap(front.points):
            # Time for a plan of the best is not spent on looks.
            if not self._pace.affords() or (plan and not self._state.budget.allows(0, plan + took)):
                return
            begin = self._state.budget.now()
            if self._estimates.refined(point) is None and self._facts.small is None:
                self._plan_point(front, point)
            elif self._estimates.has_room(point):
                seconds = self._estimates.seconds_of_plan(point)
                plan = min(plan, seconds) if plan else seconds
            took = self._state.budget.now() - begin
        if self._state.best is None and self._quickest_lacks_room():
            self._with_blocks_again(self._state.fronts[1])

    def look_at_smallest(self) -> None:
        """Look at points that take the least memory of data parallel, where the quickest by hand lacks room.

        By small steps where there are any, until one has room; else by a plan of the whole of one.
        """
        if not self._quickest_lacks_room():
            return
        points = self._smallest()
        if self._facts.small is None or self._state.budget.moves < inf:
            point = self._fewest_micro_batches(points)
            if point is not None and self._pace.affords():
                self._plan_point(self._state.fronts[1], point)
            return
        for _ in range(_SMALLEST):
            if not len(points) or not self._pace.affords():
                return
            point = points.point(int(self._estimates.rough(points).argmin()))
            self._estimates.seconds(point)
            if self._estimates.has_room(point):
                return
            points = points.without((point,))

    def _quickest_lacks_room(self) -> bool:
        """True where the quickest point by hand, if memory were no matter, should lack room."""
        quickest = self._estimates.quickest(self._state.by_hand)
        return quickest is not None and not self._estimates.may_have_room(quickest[0])

    def plan_cheapest(self) -> None:
        """Plan the layouts that sum to the least on all ranks, with nothing else: no point says them.

        Where a pipeline is the best, its stages have few layouts, and moves from it lead there by many steps only.
        """
        ranks = len(self._evaluator.ranks)
        left = self._state.planned + sum(map(len, self._state.fronts))
        point = Point(ranks)
        if ranks == 1 or not left or not self._splits(point):
            return
        strategy = self._state.strategy(point)
        # What an earlier search has planned led it on from there.
        if key_of(strategy) in self._learned.answers or not self._is_quickly_planned(point):
            return
        if self._pace.affords():
            self._plan_point(self._state.fronts[0], point)
        if not isinstance(self._state.points.get(point), Measures) or not self._pace.affords():
            return
        whole = self._evaluator.last(strategy) or self._evaluator.whole(strategy)
        added = additive_part(self._facts, strategy, whole.deduced)
        if added is not None:
            # Deduction may give the same signatures, and moves are free then to change what parameters hang on.
            bare = replace(added.cheapest, signatures=self._facts.base.signatures)
            self._state.plan(f"{point}; cheapest layouts", bare)
            self._state.plan(f"{point}; cheapest layouts, signatures fixed", added.cheapest)
            self._state.tell()

    def _is_quickly_planned(self, point: Point) -> bool:
        """True where plans of its layouts take a small part of the time, and a step of many blocks may have room."""
        if self._facts.small is not None and self._state.budget.moves == inf:
            room = bool(self._rooms(Points.one(point))[0])
            if not room or not self._pace.may_look() or self._estimates.refined(point) is None:
                return False
        soon = (2 + ADDED_UP) * self._estimates.seconds_of_plan(point)
        return self._state.budget.allows(0, soon / _CHEAPEST)

    def _splits(self, point: Point) -> bool:
        """True where each rank of a point has a sample, and what is fixed allows it."""
        return self._facts.samples >= point.data and fits(point, self._facts.base)

    def _quick_and_cheap(self, points: Points) -> Iterator[Point]:
        """Of each kind the quickest, those without a tensor axis or stages first, whose ranks are alike.

        Of points about as quick, one of few micro-batches: it is planned quickly.
        """
        kinds, rough = kinds_of(points), np.maximum(self._estimates.rough(points), 1e-12)
        about = np.trunc(np.log(rough) / log(_ABOUT)).astype(np.int64)
        order = np.lexsort((points.micro_batches, about))
        for kind in sorted(set(kinds.tolist())):
            yield points.point(int(order[kinds[order] == kind][0]))

    def _plan_point(self, front: Frontier, point: Point) -> None:
        following = front.next_point(unseen=self._facts.small is None)
        if following is not None and self._pace.in_time(following):
            self._evaluator.ahead(self._state.strategy(following))
        for each in self._state.fronts:
            each.take(point)
        by_hand = bool(Points.one(point).by_hand[0])
        measures = self._state.plan(str(point), self._state.strategy(point), by_hand)
        if isinstance(measures, Measures) and point not in self._state.points:
            self._estimates.learn(point, measures)
        self._state.points[point] = measures
        self._state.tell()

    def _was_slower(self, point: Point) -> bool:
        """True where an earlier search, with something else fixed, found a point far slower than the best is now."""
        return (
            self._state.best is not None
            and self._learned.was_slower(point, _FAR * self._state.quickest)
            and not self._evaluator.knows(self._state.strategy(point))
        )

    def _is_unlikely(self, front: Frontier) -> bool:
        """True where the next point, and so all others, should take longer than is planned before moves."""
        return front.next_seconds > self._times(seen=False) * self._state.quickest

    def _times(self, seen: bool) -> float:
        """Times as long as the best that points may take that are planned before moves."""
        if self._facts.small is None:
            return _UNLIKELY_ROUGH
        return _UNLIKELY if seen else _UNLIKELY_UNSEEN
