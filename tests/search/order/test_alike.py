"""Points alike: which ratios count for which points."""

from __future__ import annotations

from weft.search.order.rough import Alike, columns_of
from weft.search.space.point import Point
from weft.search.space.points import Points

SAMPLES = 16


def learned(*known: tuple[Point, float, float]) -> Alike:
    """What points took, in seconds and bytes, over rough estimates of them."""
    alike = Alike()
    for point, seconds, memory in known:
        alike.learn(columns_of(Points.one(point), SAMPLES), seconds, memory)
    return alike


def seconds(alike: Alike, *points: Point) -> list[float]:
    return list(map(float, alike.ratios(columns_of(Points.of(points), SAMPLES)).seconds))


def memory(alike: Alike, *points: Point) -> list[float]:
    return list(map(float, alike.ratios(columns_of(Points.of(points), SAMPLES)).memory))


def test_nothing_is_corrected_by_nothing() -> None:
    alike = Alike()
    assert alike.known == 0
    assert seconds(alike, Point(4), Point(2, 2, layouts="columns")) == [1.0, 1.0]
    assert memory(alike, Point(4), Point(4, zero=3)) == [1.0, 1.0]


def test_one_corrects_the_seconds_of_all_until_one_more_alike_is_known() -> None:
    """By layouts and stages first, then by the tensor axis, and so on."""
    plain, again = Point(4), Point(4, recompute=8)
    cut, wider = Point(2, 2, layouts="columns"), Point(1, 4, layouts="columns")
    staged = Point(2, stages=2, micro_batches=2)
    alike = learned((plain, 3.0, 1.0))
    assert seconds(alike, plain, again, cut, staged) == [3.0] * 4
    alike = learned((plain, 3.0, 1.0), (cut, 5.0, 1.0), (again, 2.0, 1.0))
    # Of stages nothing is known, so the median of all counts; of a wider axis, that of the same layouts.
    assert seconds(alike, plain, again, cut, wider, staged) == [3.0, 2.0, 5.0, 5.0, 3.0]


def test_samples_and_gathers_tell_points_apart() -> None:
    whole, split = Point(4), Point(4, micro_batches=2)
    alike = learned((whole, 2.0, 1.0), (split, 4.0, 1.0), (Point(4, zero=3), 8.0, 1.0))
    assert seconds(alike, whole, Point(4, zero=1), split) == [2.0, 2.0, 4.0]
    assert seconds(alike, Point(4, zero=3)) == [8.0]


def test_of_samples_of_which_nothing_is_known_the_nearest_count() -> None:
    """Small micro-batches take longer than by rough estimates; the fewer samples, the more so."""
    few, many = Point(2, micro_batches=8), Point(2)
    alike = learned((many, 2.0, 1.0), (few, 9.0, 1.0))
    fewer, most = Point(1, micro_batches=16), Point(2, micro_batches=2)
    assert seconds(alike, fewer, few, most, many) == [9.0, 9.0, 2.0, 2.0]
    assert seconds(alike, Point(2, recompute=8)) == [5.5]
    alike = learned((many, 2.0, 1.0), (few, 9.0, 1.0), (Point(2, zero=3), 4.0, 1.0))
    assert seconds(alike, Point(2, micro_batches=8, zero=3), few) == [4.0, 9.0]


def test_of_several_the_median_counts() -> None:
    point = Point(4)
    alike = learned((point, 9.0, 7.0), (point, 1.0, 2.0), (point, 2.0, 1.0))
    assert alike.known == 3
    assert seconds(alike, point) == memory(alike, point) == [2.0]


def test_memory_is_alike_by_shards_and_blocks_that_run_again() -> None:
    """Bytes say nothing of another level of ZeRO, whatever seconds do."""
    alike = learned((Point(4, zero=3), 2.0, 3.0))
    assert memory(alike, Point(4, zero=3), Point(2, zero=3), Point(1, 4, zero=3)) == [3.0] * 3
    others = Point(4), Point(4, zero=2), Point(4, zero=3, recompute=8), Point(2, stages=2, zero=3)
    assert memory(alike, *others) == [1.0] * 4
    assert seconds(alike, *others) == [2.0] * 4


def test_those_like_one_that_was_refused_wait() -> None:
    alike, refused = learned((Point(4), 3.0, 1.0)), Point(2, 2, layouts="columns")
    alike.refuse(columns_of(Points.one(refused), SAMPLES))
    assert alike.known == 2
    same, outer = Point(2, 2, layouts="columns", zero=1), Point(2, 2, layouts="columns", outer=True)
    others = outer, Point(1, 4, layouts="columns"), Point(2, 2, layouts="sequence"), Point(4)
    assert seconds(alike, refused, same) == [6.0, 6.0]
    assert seconds(alike, *others) == [3.0] * 4
    assert memory(alike, refused) == [1.0]


def test_columns_say_what_points_share() -> None:
    points = Points.of((Point(3), Point(4, micro_batches=2, zero=3), Point(2, stages=2)))
    columns = columns_of(points, SAMPLES)
    assert columns["samples"].tolist() == [5, 2, 8]
    assert columns["uneven"].tolist() == [True, False, False]
    assert columns["gathers"].tolist() == [False, True, False]
    assert columns["staged"].tolist() == [False, False, True]
