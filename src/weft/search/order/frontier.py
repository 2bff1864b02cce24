"""The points that were not planned yet, the one first that should be the quickest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import final

import numpy as np

from weft.cached import cached_property
from weft.errors import InternalError
from weft.search.order.estimates import Estimates
from weft.search.order.rough import RoughParts
from weft.search.space.point import Point
from weft.search.space.points import Floats, Mask, Points
from weft.units import Seconds

# So many of the next points are looked at ahead, and so many searched for one that may have room.
_AHEAD, _NEXT = 8, 512
# So many times as long as it stood in the order, or more: a point that was looked at goes back.
_BACK = 1.01
# Points whose plans take up to so many times as long as the quickest are planned soon.
_SOON = 2.0
# Points that take up to so many times the least memory take as little.
_AS_LITTLE = 1.02


@final
class Frontier:
    """A queue of points by estimates that grow better while it is emptied.

    A point comes out once it was looked at and nothing rough should be quicker; that one is looked at first. One that
    came out, and was put back, comes out again by the seconds that it was given.

    Args:
        points: all.
        least: seconds that each takes at least.
        estimates: of them.

    Attributes:
        left_out: points that came out, for want of time to look at them.
    """

    def __init__(self, points: Points, least: Floats, estimates: Estimates) -> None:
        self._points, self._least, self._estimates = points, least, estimates
        self._left: Mask = np.ones(len(points), np.bool_)
        # Which have a place that rough estimates do not change: they were looked at, or put back.
        self._settled: Mask = np.zeros(len(points), np.bool_)
        self._order: Floats = np.zeros(len(points))
        self._known = -1
        self.left_out = 0
        # Points that were looked at, for whatever reason, and stand in the order as that says.
        self._placed = set[Point]()

    def __len__(self) -> int:
        return int(self._left.sum())

    @property
    def points(self) -> Points:
        """All that are left."""
        return self._points.where(self._left)

    def drop(self, seconds: Seconds) -> int:
        """Leave out all points that take at least so long whatever their plan; their number."""
        gone: Mask = self._left & (self._least >= seconds)
        self._left &= ~gone
        return int(gone.sum())

    def put_back(self, point: Point, seconds: Seconds) -> None:
        """Put a point that came out to the place of one that takes so long.

        Raises:
            InternalError: it is none of the points.
        """
        number = self._points.number(point)
        if number is None:
            raise InternalError(f"{point} is put back where it never was")
        self._left[number], self._settled[number], self._order[number] = True, True, seconds

    @property
    def next_seconds(self) -> float:
        """Seconds of the next point, about; endless without one."""
        return float(self._now().min(initial=inf))

    def next_point(self, rough: bool) -> Point | None:
        """The next point; with `rough` false only where it has a place by more than a rough estimate."""
        number = self._first()
        if number is None or not (rough or self._settled[number]):
            return None
        return self._points.point(number)

    def pop_as_it_stands(self) -> Point:
        """The next point as it stands, which comes out; none that should lack room, where another is among the next.

        Raises:
            IndexError: there is none left.
        """
        number = self._first()
        if number is None:
            raise IndexError("no point is left")
        return self._taken(next(self._with_room(), number))

    def pop_quickly_planned(self) -> Point | None:
        """Of the next points the one that is planned the quickest, which comes out; with room if one should have it."""
        numbers = list(self._with_room()) or [n for n in self._next(_NEXT) if self._left[n]]
        points = [self._points.point(number) for number in numbers]
        took = [self._estimates.seconds_of_plan(point) for point in points]
        return self._taken(numbers[took.index(min(took))]) if took else None

    def pop_of_least_memory(self) -> Point | None:
        """The point that takes the least memory by rough estimate, of those that take as little the quickest.

        It comes out. Each plan corrects the estimates of points alike: where one lacks room, others are next.
        """
        if not len(self):
            return None
        memory = np.where(self._left, self._estimates.rough_memory(self._rough_parts), inf)
        least = np.flatnonzero(memory <= _AS_LITTLE * memory.min())
        return self._taken(int(least[self._now()[least].argmin()]))

    def look_at(self, point: Point) -> None:
        """Look at a point, if it is left and stands by a rough estimate: it takes its place in the order."""
        number = self._points.number(point)
        if number is not None and self._left[number] and not self._settled[number]:
            self._look(number)

    def has_room(self) -> bool:
        """True where one of the next points should have room, as far as is known."""
        return next(self._with_room(), None) is not None

    def _with_room(self) -> Iterator[int]:
        """The numbers of those of the next points that should have room, as far as is known."""
        for each in self._next(_NEXT) if len(self) else ():
            if self._left[each] and self._estimates.may_have_room(self._points.point(each)):
                yield each

    def pop(
        self,
        more: Callable[[], bool],
        in_time: Callable[[Point], bool],
        must: Callable[[], bool] = lambda: False,
        looks_in_time: Callable[[Point], bool] = lambda _: True,
        surely: bool = True,
    ) -> Point | None:
        """The point that should be the quickest of all.

        Args:
            more: true while there is time to look at further points; then the quickest of those counts that were
                looked at and have room.
            in_time: true where there is time to plan a point.
            must: true while further points are looked at where none of those has room.
            looks_in_time: true where there is time to look at a point; others are left out.
            surely: true where points that were looked at and may lack room wait for further looks.

        Returns:
            None where none is left, or none of them was looked at and there is no time for it.
        """
        while True:
            number = self._first()
            if number is None:
                return None
            point = self._points.point(number)
            if self._settled[number]:
                if not self._falls_back(number, point):
                    return self._taken(number)
                continue
            if not self._estimates.looked_at(point):
                if not more():
                    known = self.pop_known(in_time, surely)
                    if known is not None or not must():
                        return known
                if not looks_in_time(point):
                    self._left[number] = False
                    self.left_out += 1
                    continue
            self._look(number)

    def _falls_back(self, number: int, point: Point) -> bool:
        """True where a point that was looked at takes another place: plans of others have shown that it takes more."""
        if not self._estimates.looked_at(point):
            return False
        seconds = self._estimates.seconds(point)
        back = bool(seconds > self._order[number] * _BACK)
        if back:
            self._order[number] = seconds
        return back

    def known(self, in_time: Callable[[Point], bool], surely: bool = True) -> Point | None:
        """The quickest point that was looked at, has room and can be planned in time; None where there is none.

        Where none can be, the one that is planned the quickest. With `surely` false also one that may have room.
        """
        estimates, points = self._estimates, self._points
        numbers = np.flatnonzero(self._left & self._looked_at())
        known = [points.point(int(each)) for each in numbers]
        has_room = estimates.has_room if surely else estimates.is_near
        known = [each for each in known if estimates.looked_at(each) and has_room(each)]

        def order(point: Point) -> tuple[bool, float]:
            if in_time(point):
                return False, estimates.seconds(point)
            return True, estimates.seconds_of_plan(point)

        return min(known, key=order, default=None)

    def pop_smallest(self) -> Point | None:
        """The point that takes the least memory of those that were looked at, with room or without; it comes out.

        None of a pipeline, nor one that is planned twice as long as others, or longer: its plan would take too long.
        """
        estimates, left = self._estimates, self.points
        took = {each: estimates.seconds_of_plan(each) for each in estimates.looks if left.has(each)}
        soon = _SOON * min(took.values(), default=0.0)
        memory = {
            each: found.memory
            for each, seconds in took.items()
            if seconds <= soon and (found := estimates.refined(each)) is not None
        }
        smallest = min(memory, key=lambda point: memory[point], default=None)
        if smallest is not None:
            self.take(smallest)
        return smallest

    def pop_known(self, in_time: Callable[[Point], bool], surely: bool = True) -> Point | None:
        """The point that `known` gives, which comes out."""
        point = self.known(in_time, surely)
        if point is not None:
            self.take(point)
        return point

    def take(self, point: Point) -> None:
        """Leave out a point, if it is one of these: it is planned."""
        number = self._points.number(point)
        if number is not None:
            self._left[number] = False

    def _look(self, number: int) -> None:
        """Look at a point, and have those that are next planned by other processes meanwhile."""
        self._look_ahead()
        self._order[number] = self._estimates.look(self._points.point(number))
        self._settled[number] = True

    @cached_property
    def _rough_parts(self) -> RoughParts:
        return self._estimates.rough_parts(self._points)

    def _now(self) -> Floats:
        """Seconds of all points as they are known now; endless for those that are gone."""
        known = self._estimates.known
        if known != self._known:
            rough = ~self._settled
            self._order[rough] = self._estimates.rough_from(self._rough_parts)[rough]
            self._place_looked_at()
            self._known = known
        return np.where(self._left, self._order, inf)

    def _place_looked_at(self) -> None:
        """Place points that were looked at without coming to the front."""
        for point in [each for each in self._estimates.looks if each not in self._placed]:
            self._placed.add(point)
            number = self._points.number(point)
            if (
                number is not None and not self._settled[number]
            ):  # others may have been put back elsewhere
                self._order[number] = self._estimates.seconds(point)
                self._settled[number] = True

    def _first(self) -> int | None:
        if not self._left.any():
            return None
        number = int(self._now().argmin())
        # All that are left may be endless.
        return number if self._left[number] else int(self._left.argmax())

    def _taken(self, number: int) -> Point:
        self._left[number] = False
        return self._points.point(number)

    def _look_ahead(self) -> None:
        """Have those that are looked at next planned by other processes that have time."""
        for number in self._next(_AHEAD):
            point = self._points.point(number)
            wanted = self._left[number] and not self._settled[number]
            if wanted and not self._estimates.ahead(point):
                return

    def _next(self, count: int) -> Iterator[int]:
        """The numbers of the next points; where few are left, those of some that are gone, too."""
        now = self._now()
        several = np.argpartition(now, min(count, len(now) - 1))[:count]
        yield from (int(each) for each in several[np.argsort(now[several], kind="stable")])

    def _looked_at(self) -> Mask:
        """The points of which the one without stages was looked at."""
        flat = [self._points.flat_as(point) for point in self._estimates.looks]
        found: Mask = np.any([self._settled, *flat], axis=0)
        return found
