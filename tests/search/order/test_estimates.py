"""Points that should have room, as far as is known before they are planned."""

from __future__ import annotations

from dataclasses import replace

import pytest

from search.jobs import begun, decoder
from weft.search.evaluation.measures import Measures, Refused
from weft.search.order.estimates import Estimates
from weft.search.order.rough import Alike, RoughEstimates
from weft.search.record.record import Learned, Look
from weft.search.space.point import Point
from weft.search.space.points import Points
from weft.units import Bytes, Seconds

# Above what the device reserves. Of all points with ZeRO 3 those of `SHARDED` should take the least without recompute:
# 312 kB by rough estimates, 336 by small steps.
LIMIT = 335_000
RESERVE = begun(decoder(8), "h100x2").floors.reserve
NOTHING = Seconds(0.0), Seconds(0.0)
SHARDED = Point(2, zero=3)


def crowded(limit: int) -> Estimates:
    """The estimates of a search under a limit."""
    return begun(decoder(8), "h100x2", RESERVE + limit).estimates


def test_points_that_take_more_by_small_steps_have_no_room() -> None:
    estimates = crowded(LIMIT)
    assert estimates.may_have_room(SHARDED)
    estimates.refined(SHARDED)
    assert not estimates.may_have_room(SHARDED)


def test_points_alike_are_corrected_by_the_bytes_of_one() -> None:
    """One that takes more than rough estimates: one of the same layouts and ZeRO has no room either, another has."""
    estimates = crowded(400_000)
    alike, other = Point(2, zero=3), Point(1, tensor=2, layouts="columns")
    assert estimates.may_have_room(alike)
    assert estimates.may_have_room(other)
    estimates.learn(SHARDED, Measures(Seconds(1.0), Bytes(RESERVE + 400_000), *NOTHING))
    assert not estimates.may_have_room(alike)
    assert estimates.may_have_room(other)


def test_points_with_all_blocks_again_stand_for_those_with_as_few_as_give_room() -> None:
    """In order, not in the plan: by rough estimates and, once they were looked at, by small steps."""
    estimates, every = crowded(LIMIT), replace(SHARDED, recompute=8)
    alone = begun(decoder(8), "h100x2").estimates
    none, least = alone.rough_of(SHARDED), alone.rough_of(every)
    assert alone.seconds(every) == alone.seconds_as_it_stands(every)
    estimates.refined(SHARDED)
    assert none < estimates.rough_of(every)
    fewer = estimates.just_enough(every)
    assert fewer is not None
    assert 0 < fewer.recompute < 8
    assert estimates.seconds(every) == estimates.seconds_as_it_stands(fewer)
    assert estimates.seconds(every) < estimates.seconds_as_it_stands(every)
    assert least > none


def test_points_alike_wait_where_one_was_refused() -> None:
    """Its layouts and tensor axis with other micro-batches, too; no others."""
    point, alike, other = (
        Point(1, tensor=2, layouts="columns", micro_batches=m) for m in (1, 2, 1)
    )
    other = replace(other, layouts="sequence")
    before = crowded(LIMIT)
    points = Points.of((alike, other))
    known = Learned(looks={point: Look(Refused("not so"), 0.0)})
    after = replace(before, learned=known, _looks={}, _alike=Alike())
    assert (after.rough(points) / before.rough(points)).tolist() == [2.0, 1.0]
    assert after.known > before.known


def test_uneven_samples_wait_and_are_corrected_by_their_like() -> None:
    """What 4 samples on 3 ranks took says nothing of those that are shared evenly."""
    estimates = begun(decoder(8), "h100x4").estimates
    even, uneven = Points.one(Point(2)), Points.one(Point(3))
    rough = RoughEstimates(estimates.floors)
    before = estimates.rough(even) / rough.seconds(even)
    assert estimates.rough(uneven) / rough.seconds(uneven) == 2 * before
    estimates.learn(Point(2), Measures(Seconds(1.0), Bytes(RESERVE), *NOTHING))
    slow = Measures(Seconds(100.0), Bytes(RESERVE), *NOTHING)
    estimates.learn(Point(3), slow)
    assert abs(float(estimates.rough(even)[0]) - 1.0) < 1e-9
    assert abs(float(estimates.rough(uneven)[0]) - 100.0) < 1e-6


def test_a_pipeline_that_was_looked_at_corrects_others_alike() -> None:
    """Those of another schedule, which nothing was planned for, come nearer to what small steps say."""
    estimates = begun(decoder(8), "h100x4").estimates
    one = Point(2, stages=2, micro_batches=2, schedule="1f1b")
    other, flat = replace(one, schedule="gpipe"), Point(2, micro_batches=2)
    before, plain = estimates.rough_of(other), estimates.rough_of(flat)
    estimates.look(one)
    assert estimates.rough_of(other) != before
    assert estimates.rough_of(one) == pytest.approx(estimates.seconds(one))
    assert estimates.rough_of(flat) != plain


def test_pipelines_have_room_only_with_some_to_spare() -> None:
    """Their bytes are not known as well; of those that lack little none stands behind all others."""
    point, free = Point(1, stages=2, micro_batches=4), begun(decoder(8), "h100x2")
    found = free.estimates.refined(point)
    assert found is not None
    for part, room, near in (
        (1.2, True, True),
        (1.05, False, True),
        (0.95, False, True),
        (0.75, False, False),
    ):
        estimates = begun(decoder(8), "h100x2", int(part * found.memory)).estimates
        seconds = estimates.seconds(point)
        assert estimates.has_room(point) == room
        assert (seconds < 1.25 * found.seconds) == near
        assert (seconds == found.seconds) == (part > 1)


def test_what_runs_again_is_held_where_gradients_of_weights_are_put_off() -> None:
    """Zero bubble holds what ran again until these; 1F1B lets it go."""
    estimates = crowded(10**9)
    none = Point(1, stages=2, micro_batches=4, schedule="zero_bubble")
    held, gone = (replace(none, recompute=8, schedule=name) for name in ("zero_bubble", "1f1b"))
    kept, still, less = (estimates.refined(each) for each in (none, held, gone))
    assert kept is not None
    assert still is not None
    assert less is not None
    assert less.memory < kept.memory <= still.memory
    rough = estimates.rough_memory(estimates.rough_parts(Points.of((none, held, gone))))
    assert rough[2] < rough[0] == rough[1]


def test_a_pipeline_that_was_planned_says_the_bytes_of_others_alike() -> None:
    estimates = begun(decoder(8), "h100x2").estimates
    one = Point(1, stages=2, micro_batches=4, schedule="1f1b")
    other = replace(one, micro_batches=2)
    before = estimates.refined(other)
    about = estimates.refined(one)
    assert before is not None
    assert about is not None
    estimates.learn_plan(one, replace(about, memory=Bytes(2 * about.memory)))
    after = estimates.refined(other)
    assert after is not None
    assert after.memory > before.memory


def test_looks_at_many_micro_batches_take_longer() -> None:
    """Half of the time hangs on their number; of layers that are cut, as of others where none was looked at."""
    estimates, many = begun(decoder(8), "h100x2").estimates, Point(2, micro_batches=4)
    assert estimates.seconds_of_look(many) == 0.0
    estimates.refined(Point(2))
    one = estimates.seconds_of_look(replace(Point(2), zero=1))
    assert one > 0
    assert estimates.seconds_of_look(many) == pytest.approx(2.5 * one)
    assert estimates.seconds_of_look(Point(2)) == 0.0
    cut = Point(1, tensor=2, layouts="columns")
    assert estimates.seconds_of_look(cut) == one
    assert estimates.seconds_of_plan(cut) == estimates.seconds_of_plan(Point(2)) > 0
