"""The order in which points come out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.errors import InternalError
from weft.search.evaluation.measures import Measures
from weft.search.order.frontier import Frontier
from weft.search.space.point import Point
from weft.search.space.points import Floats, Points
from weft.units import Bytes, Seconds

NONE = Seconds(0.0)
QUICK, MIDDLE, SLOW, LARGE = Point(8), Point(4), Point(2), Point(1)
SECONDS = {QUICK: 1.0, MIDDLE: 2.0, SLOW: 3.0, LARGE: 0.5}


class Known:
    """Estimates of points that were all looked at; one of them has no room."""

    known = 0
    looks: tuple[Point, ...] = ()

    def rough_parts(self, points: Points) -> Points:
        return points

    def rough_from(self, points: Points) -> Floats:
        return np.array([SECONDS[points.point(number)] for number in range(len(points))])

    def seconds(self, point: Point) -> float:
        return SECONDS[point] * (100.0 if point == LARGE else 1.0)

    def look(self, point: Point) -> float:
        return self.seconds(point)

    def looked_at(self, point: Point) -> bool:
        return True

    def ahead(self, point: Point) -> bool:
        return True

    def has_room(self, point: Point) -> bool:
        return point != LARGE

    def is_near(self, point: Point) -> bool:
        return True

    def may_have_room(self, point: Point) -> bool:
        return self.has_room(point)

    def seconds_of_plan(self, point: Point) -> float:
        return 10.0 * SECONDS[point]


def front() -> Frontier:
    estimates: Any = Known()
    least = np.array([0.5 * seconds for seconds in SECONDS.values()])
    return Frontier(Points.of(SECONDS), least, estimates)


def always(_: Point | None = None) -> bool:
    return True


def test_the_quickest_with_room_comes_first() -> None:
    points = front()
    came = [points.pop(always, always) for _ in SECONDS]
    assert came == [QUICK, MIDDLE, SLOW, LARGE]
    assert points.pop(always, always) is None


def test_the_next_point_counts_as_seen_once_it_came_up() -> None:
    points = front()
    assert points.pop(always, always) == QUICK
    assert points.next_point(rough=True) == MIDDLE
    assert points.next_point(rough=False) is None


def test_points_that_cannot_be_quicker_are_dropped() -> None:
    points = front()
    assert points.drop(Seconds(1.0)) == 2
    assert len(points) == 2
    assert [points.pop(always, always) for _ in range(3)] == [QUICK, LARGE, None]


def test_a_point_goes_back_behind_one_that_is_like_it() -> None:
    points = front()
    first = points.pop(always, always)
    assert first == QUICK
    points.put_back(QUICK, Seconds(2.5))
    estimates: Any = points._estimates
    estimates.known += 1  # estimates have become better meanwhile
    came = [points.pop(always, always) for _ in range(3)]
    assert came == [MIDDLE, QUICK, SLOW]


def test_a_point_that_came_out_unseen_keeps_the_place_that_it_is_put_back_to() -> None:
    points = front()
    taken = points.pop_as_it_stands()
    points.put_back(taken, Seconds(2.5))
    estimates: Any = points._estimates
    estimates.known += 1
    assert [taken, *(points.pop(always, always) for _ in range(2))] == [QUICK, MIDDLE, QUICK]


def test_without_time_for_looks_the_quickest_known_one_comes() -> None:
    """A point whose like without stages was looked at counts as known; one without room does not."""
    points = front()
    estimates: Any = points._estimates
    estimates.looks = (SLOW, LARGE)
    estimates.looked_at = lambda point: point in estimates.looks
    assert points.pop(lambda: False, always) == SLOW
    assert points.pop(lambda: False, always) is None


def test_a_point_that_was_looked_at_meanwhile_stands_as_that_says() -> None:
    """By floors alone the slow one would come last."""
    points = front()
    estimates: Any = points._estimates
    assert points.pop(always, always) == QUICK
    estimates.known, estimates.looks, estimates.seconds = 1, (SLOW,), lambda _: 0.1
    assert points.pop(lambda: False, always) == SLOW


def test_the_quickest_known_one_stays_until_it_is_taken() -> None:
    """Where none can be planned in time, the one that is planned the quickest; never one without room."""
    points = front()
    estimates: Any = points._estimates
    assert points.known(always) is None
    estimates.looks = (SLOW, MIDDLE, LARGE)
    assert [points.known(always), points.known(always)] == [MIDDLE, MIDDLE]
    assert points.known(lambda point: point == SLOW) == SLOW
    assert points.known(lambda _: False) == MIDDLE
    came = [points.pop_known(always) for _ in range(3)]
    assert came == [MIDDLE, SLOW, None]
    assert points.pop_known(always, surely=False) == LARGE


def test_a_point_that_was_planned_is_taken_out_wherever_it_stands() -> None:
    points = front()
    points.take(MIDDLE)
    points.take(Point(64))
    assert [points.pop(always, always) for _ in range(3)] == [QUICK, SLOW, LARGE]
    with pytest.raises(InternalError, match="never was"):
        points.put_back(Point(64), Seconds(1.0))


def test_the_smallest_that_was_looked_at_comes_where_none_has_room() -> None:
    points = front()
    estimates: Any = points._estimates
    memory = {SLOW: 3, MIDDLE: 2, LARGE: 4}
    estimates.refined = lambda point: Measures(*(Seconds(1.0), Bytes(memory[point]), NONE, NONE))
    assert points.pop_smallest() is None
    estimates.looks = tuple(memory)
    took = {SLOW: 1.0, MIDDLE: 3.0, LARGE: 1.5}
    estimates.seconds_of_plan = took.get
    # A plan that takes long waits for others, whatever memory it takes.
    assert [points.pop_smallest() for _ in range(4)] == [SLOW, MIDDLE, LARGE, None]


def test_a_point_that_cannot_be_looked_at_in_time_is_left_out() -> None:
    points = front()
    estimates: Any = points._estimates
    estimates.looked_at = lambda point: point == SLOW
    assert points.pop(always, always, looks_in_time=lambda point: point != QUICK) == MIDDLE
    assert (points.left_out, len(points)) == (1, 2)


def test_a_point_that_plans_of_others_show_to_take_more_goes_back() -> None:
    points = front()
    estimates: Any = points._estimates
    points.put_back(points.pop_as_it_stands(), Seconds(0.1))
    assert points.next_point(rough=False) == QUICK
    estimates.seconds = lambda point: 50.0 if point == QUICK else 100.0 * (point == LARGE) + 1.0
    assert {points.pop(always, always) for _ in range(2)} == {MIDDLE, SLOW}
    assert points.pop(always, always) == QUICK
