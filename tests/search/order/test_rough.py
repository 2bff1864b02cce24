"""Rough estimates: they tell far quicker and smaller points, before any plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from search.jobs import begun, decoder, dense, few_samples, many_samples, planned, step_of
from search.machines import SLOW
from weft.search.order.rough import RoughEstimates
from weft.search.space.fixed import space_of
from weft.search.space.point import Point
from weft.search.space.points import Points


def rough(limit: int | None = None) -> RoughEstimates:
    return RoughEstimates(begun(decoder(8), "h100x4", limit).floors)


def seconds(found: RoughEstimates, *points: Point) -> list[float]:
    return list(map(float, found.seconds(Points.of(points))))


def memory(found: RoughEstimates, *points: Point) -> list[float]:
    return list(map(float, found.memory(Points.of(points))))


def test_gradients_and_sums_decide_where_links_are_slow() -> None:
    """Of a model without numbered blocks: large weights and few samples are for a Megatron grid."""
    few = begun(few_samples(), SLOW).estimates
    grid, plain = Point(1, 4, layouts="columns"), Point(4)
    assert few.rough_of(plain) > 10 * few.rough_of(grid)
    many = begun(many_samples(), SLOW).estimates
    assert many.rough_of(plain) < many.rough_of(grid)


def test_exchanges_of_each_micro_batch_decide_where_links_are_slow() -> None:
    """Split gradients are reduced, and split parameters gathered, in each of them."""
    found = begun(step_of(dense(512, 512, 512, 512, 10), 64, 512), SLOW)
    levels = [Point(4, zero=zero, micro_batches=8) for zero in range(4)]
    whole, _, split, gathered = took = [planned(found, point).seconds for point in levels]
    assert 3 * whole < split < gathered
    for point, each in zip(levels, took, strict=True):
        assert 0.5 < found.estimates.rough_of(point) / each < 2, str(point)


def test_they_are_above_floors() -> None:
    """Of all points: nothing is hidden that a floor counts, and more is counted."""
    found = rough()
    space = space_of(found.floors.facts, every_rank=True)
    assert (found.seconds(space) > found.floors.least(space)).all()
    assert (found.memory(space) > found.floors.variables(space)).all()


def test_layouts_that_deduction_finds_are_about_as_data_parallel() -> None:
    found, plain = rough(), Point(4)
    free, line = Point(2, 2, layouts="free"), Point(4, layouts="free")
    took = seconds(found, plain, free, line)
    assert took[0] < took[1] < 1.5 * took[0]
    assert memory(found, free, line) == memory(found, plain, plain)


def test_few_micro_batches_leave_stages_idle() -> None:
    """Times as long as the mean stage works: those before and behind it have their turn once."""
    found = rough()
    few = Point(1, stages=4, micro_batches=1, schedule="1f1b")
    many = replace(few, micro_batches=4)
    in_turns = replace(few, turns=2, schedule="interleaved")
    points = Points.of((few, many, in_turns))
    times = found.seconds(points) / found.floors.work.busy(points)
    uneven = found.floors.work.unevenness(points)
    late = (times - uneven).tolist()
    assert late[:2] == pytest.approx([3.0, 0.75])
    # A micro-batch goes through all stages, one after the other, in however many turns.
    assert times[2] == pytest.approx(4.0)
    assert uneven[2] + 1.5 < 4.0


def test_gpipe_holds_all_micro_batches() -> None:
    two = Point(1, stages=2, micro_batches=4)
    all_of_them, some = memory(rough(), *(replace(two, schedule=s) for s in ("gpipe", "1f1b")))
    assert some < all_of_them


def test_blocks_that_run_again_or_wait_take_longer_and_hold_less() -> None:
    found, every = rough(), (Point(4), Point(4, recompute=8), Point(4, offload=8))
    (plain, again, waiting), (kept, one, other) = seconds(found, *every), memory(found, *every)
    assert plain < again
    assert plain < waiting
    assert one == other < kept


def test_shards_hold_less_the_more_is_split() -> None:
    """Parameters, and sums of several micro-batches, are whole or not."""
    levels = [Point(4, zero=zero, micro_batches=2) for zero in range(4)]
    whole, states, gradients, split = memory(rough(), *levels)
    assert whole > states > gradients > split


def test_uneven_samples_take_twice_as_long() -> None:
    found, points = rough(), Points.of((Point(2), Point(3)))
    assert (found.of(points).seconds / found.seconds(points)).tolist() == [1.0, 2.0]
    assert found.of(points).memory.tolist() == found.memory(points).tolist()


def test_points_with_all_blocks_again_stand_beside_those_with_none() -> None:
    """Only where memory has a limit."""
    points = Points.of(
        (Point(4), Point(4, recompute=8), Point(4, offload=8), Point(4, recompute=4))
    )
    parts = rough(10**9).parts(points)
    assert parts.every.tolist() == [False, True, True, False]
    plain = rough().of(Points.one(Point(4)))
    assert parts.kept.seconds.tolist() == [plain.seconds[0]] * 2
    assert parts.kept.memory.tolist() == [plain.memory[0]] * 2
    assert parts.points.seconds.tolist() == rough().of(points).seconds.tolist()
    free = rough().parts(points)
    assert not free.every.any()
    assert len(free.kept.seconds) == 0


def test_points_wait_the_longer_the_more_room_they_lack() -> None:
    """Those that lack little may have room after all: they stand behind others by that, not behind all."""
    found = rough(rough().floors.reserve + 10**9)
    memory = np.array([0.5, 1.05, 1.1, 2.0, 4.0]) * 10**9
    fits, near, nearly, over, far = found.crowding(memory).tolist()
    assert fits == 1.0 < near < nearly < 1.25
    assert 10 < over < far
    assert found.roomy(memory).tolist() == [True, False, False, False, False]
    assert rough().crowding(memory).tolist() == [1.0] * 5
    assert rough().roomy(memory).all()


def test_bytes_of_blocks_that_run_again_are_of_plans_where_memory_is_tight() -> None:
    """What stands outside of blocks stays: of this decoder far more than a seventh."""
    again, free = Point(4, recompute=8), rough()
    need = planned(begun(decoder(8), "h100x4"), again).memory - free.floors.reserve
    (about,) = memory(free, again)
    (close,) = memory(rough(free.floors.reserve + 10**5), again)
    assert about < close < need
    assert memory(rough(free.floors.reserve + 10**9), again) == [about]


@pytest.mark.parametrize("limit", [None, 10**9])
def test_of_no_points_there_is_nothing(limit: int | None) -> None:
    found, none = rough(limit), Points.of(())
    assert [len(each) for each in (found.seconds(none), found.memory(none))] == [0, 0]
    assert len(found.parts(none).points.seconds) == 0
