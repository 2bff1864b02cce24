"""The points that were not planned yet, the one first that should be the quickest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush, nsmallest
from math import inf
from typing import TypeAlias, final

from weft.search.order.estimates import Estimates
from weft.search.space import Point

# Seconds; false before true where people write such points by hand; the point; whether it was looked at.
_Entry: TypeAlias = tuple[float, bool, Point, bool]

# So many of the next points are looked at ahead.
_AHEAD = 8


@final
class Frontier:
    """A queue of points by estimates that grow better while it is emptied.

    A point comes out once it was looked at and nothing rough should be quicker; that one is looked at first.

    Args:
        points: all.
        estimates: of them.
    """

    def __init__(self, points: Sequence[Point], estimates: Estimates) -> None:
        self._estimates = estimates
        self._heap: list[_Entry] = [
            (estimates.rough(each), not each.by_hand, each, False) for each in points
        ]
        heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Point]:
        return (point for _, _, point, _ in self._heap)

    @property
    def next_seconds(self) -> float:
        """Seconds of the next point, about; endless without one."""
        return self._heap[0][0] if self._heap else inf

    def next_point(self, unseen: bool) -> Point | None:
        """The next point; with `unseen` false only where it was looked at."""
        return self._heap[0][2] if self._heap and (unseen or self._heap[0][3]) else None

    def first(self) -> Point:
        """The next point as it stands.

        Raises:
            IndexError: there is none left.
        """
        return heappop(self._heap)[2]

    def pop(
        self,
        more: Callable[[], bool],
        hopeless: Callable[[Point], bool],
        in_time: Callable[[Point], bool],
    ) -> Point | None:
        """The point that should be the quickest of all, or one that cannot be.

        Args:
            more: true while there is time to look at further points; then the quickest of those counts that were
                looked at and have room.
            hopeless: true where a point need not be looked at.
            in_time: true where there is time to plan a point.

        Returns:
            None where none is left, or none of them was looked at and there is no time for it.
        """
        while self._heap:
            seconds, hand, point, looked_at = heappop(self._heap)
            if looked_at or hopeless(point):
                return point
            now = float(self._estimates.rough(point))
            if now > seconds * (1 + 1e-9):
                heappush(self._heap, (now, hand, point, False))
            elif self._estimates.looked_at(point) or more():
                self._look_ahead()
                heappush(self._heap, (self._estimates.seconds(point), hand, point, True))
            else:
                heappush(self._heap, (seconds, hand, point, False))
                return self._pop_known(in_time)
        return None

    def _look_ahead(self) -> None:
        """Have those that are looked at next planned by other processes that have time."""
        for _, _, point, looked_at in nsmallest(_AHEAD, self._heap):
            if not looked_at and not self._estimates.ahead(point):
                return

    def _pop_known(self, in_time: Callable[[Point], bool]) -> Point | None:
        """The quickest point that was looked at, has room and can be planned in time; None where there is none.

        Where none can be, the one that is planned the quickest.
        """
        estimates = self._estimates
        places = [
            place
            for place, (_, _, point, _) in enumerate(self._heap)
            if estimates.looked_at(point) and estimates.has_room(point)
        ]
        if not places:
            return None

        def order(place: int) -> tuple[bool, float]:
            point = self._heap[place][2]
            if in_time(point):
                return False, estimates.seconds(point)
            return True, estimates.seconds_of_plan(point)

        place = min(places, key=order)
        point = self._heap[place][2]
        self._heap[place] = self._heap[-1]
        del self._heap[-1]
        heapify(self._heap)
        return point
