"""The order in which points come out."""

from __future__ import annotations

from typing import Any

from weft.search.order.frontier import Frontier
from weft.search.space import Point

QUICK, MIDDLE, SLOW, LARGE = Point(8), Point(4), Point(2), Point(1)
SECONDS = {QUICK: 1.0, MIDDLE: 2.0, SLOW: 3.0, LARGE: 0.5}


class Known:
    """Estimates of points that were all looked at; one of them has no room."""

    def rough(self, point: Point) -> float:
        return SECONDS[point]

    def seconds(self, point: Point) -> float:
        return SECONDS[point] * (100.0 if point == LARGE else 1.0)

    def looked_at(self, point: Point) -> bool:
        return True

    def ahead(self, point: Point) -> bool:
        return True

    def has_room(self, point: Point) -> bool:
        return point != LARGE

    def seconds_of_plan(self, point: Point) -> float:
        return 10.0 * SECONDS[point]


def front() -> Frontier:
    estimates: Any = Known()
    return Frontier(list(SECONDS), estimates)


def always(_: Point | None = None) -> bool:
    return True


def never(_: Point | None = None) -> bool:
    return False


def test_the_quickest_with_room_comes_first() -> None:
    points = front()
    came = [points.pop(always, never, always) for _ in SECONDS]
    assert came == [QUICK, MIDDLE, SLOW, LARGE]
    assert points.pop(always, never, always) is None


def test_the_next_point_counts_as_seen_once_it_came_up() -> None:
    points = front()
    assert points.pop(always, never, always) == QUICK
    assert points.next_point(unseen=True) == MIDDLE
    assert points.next_point(unseen=False) is None
