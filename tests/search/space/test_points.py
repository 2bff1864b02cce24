"""Points by column say what each of them says by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.search.space.point import Point
from weft.search.space.points import Points

EVERY = (
    Point(4),
    Point(2, 2, layouts="columns", zero=1),
    Point(2, 2, layouts="free"),
    Point(1, 2, 2, "sequence", 4, "1f1b", outer=True),
    Point(2, stages=2, micro_batches=4, schedule="interleaved", turns=2),
    Point(4, recompute=3, experts=True),
    Point(4, offload=3),
)


def test_they_are_read_back_as_they_were() -> None:
    found = Points.of(EVERY)
    assert tuple(found) == EVERY
    assert len(found) == len(EVERY)
    assert [type(each.outer) for each in found] == [bool] * len(EVERY)
    assert list(Points.one(EVERY[3])) == [EVERY[3]]
    assert (len(Points.of(())), list(Points.of(()))) == (0, [])


def test_columns_are_the_coordinates() -> None:
    found = Points.of(EVERY)
    for name in (
        *("data", "tensor", "stages", "micro_batches", "zero", "recompute"),
        *("outer", "turns", "offload", "experts", "ranks"),
    ):
        assert getattr(found, name).tolist() == [getattr(each, name) for each in EVERY]
    assert found.axes.tolist() == [len(each.grid) for each in EVERY]
    assert found.laid("free").tolist() == [each.layouts == "free" for each in EVERY]
    named = found.scheduled("1f1b", "interleaved")
    assert named.tolist() == [each.schedule != "" for each in EVERY]


def test_a_grid_has_one_number() -> None:
    grids = Points.of(EVERY).grids.tolist()
    same = {(each.data, each.tensor, each.stages) for each in EVERY}
    assert len(set(grids)) == len(same)
    assert grids[0] == grids[5] == grids[6]
    assert grids[1] == grids[2] != grids[3]


def test_each_is_found_by_its_coordinates() -> None:
    found = Points.of(EVERY)
    assert [found.number(each) for each in EVERY] == list(range(len(EVERY)))
    other = replace(EVERY[0], zero=1)
    assert (found.number(other), found.has(other)) == (None, False)
    assert found.has(EVERY[6])
    assert tuple(found.without([EVERY[0], EVERY[6], other])) == EVERY[1:6]


def test_a_flat_point_stands_for_its_pipelines() -> None:
    flat = Point(2, micro_batches=4)
    every = Points.of([flat, EVERY[4], replace(EVERY[4], zero=1), replace(EVERY[4], data=1)])
    assert every.flat_as(flat).tolist() == [True, True, False, False]


def test_some_are_made_others() -> None:
    found = Points.of(EVERY)
    assert tuple(found.with_all_kept()) == tuple(
        replace(each, recompute=0, offload=0) for each in EVERY
    )
    assert tuple(found.data_parallel()) == tuple(
        replace(
            each,
            data=each.data * each.tensor,
            tensor=1,
            layouts="data",
            outer=False,
            experts=False,
        )
        for each in EVERY
    )
    laid = tuple(found.laid_as("free", "data"))
    assert laid == (*EVERY[:2], replace(EVERY[2], layouts="data"), *EVERY[3:])
    assert tuple(found) == EVERY


@pytest.mark.parametrize(
    ("point", "by_hand"),
    [
        (Point(4), True),
        (Point(4, zero=3, micro_batches=8), True),
        (Point(2, 2, layouts="columns", zero=1), True),
        (Point(2, 2, layouts="columns", zero=2), False),
        (Point(2, 2, layouts="columns", outer=True), False),
        (Point(4, layouts="free"), False),
        (Point(4, recompute=3), False),
        (Point(4, offload=3), False),
        (Point(4, experts=True), False),
        (Point(1, stages=4, micro_batches=8, schedule="1f1b"), True),
        (Point(1, stages=4, micro_batches=16, schedule="gpipe"), True),
        (Point(1, stages=4, micro_batches=4, schedule="1f1b"), False),
        (Point(1, stages=4, micro_batches=32, schedule="1f1b"), False),
        (Point(1, stages=3, micro_batches=8, schedule="1f1b"), False),
        (Point(1, stages=4, micro_batches=8), False),
        (Point(2, stages=4, micro_batches=8, schedule="1f1b", zero=1), False),
        (Point(1, stages=4, micro_batches=8, schedule="interleaved", turns=2), True),
        (Point(1, stages=4, micro_batches=8, schedule="interleaved", turns=4), False),
    ],
    ids=str,
)
def test_some_are_written_by_hand(point: Point, by_hand: bool) -> None:
    assert Points.one(point).by_hand.tolist() == [by_hand]
