"""Estimates of pipelines, by a point without stages of which all is known."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from search.jobs import begun, decoder, planned
from weft.search.bounds.floors import Floors
from weft.search.evaluation.measures import Measures
from weft.search.order.in_stages import Pipelines, _gathered_ahead, in_stages
from weft.search.space.point import Point
from weft.strategy.parts import Zero
from weft.strategy.strategy import Strategy
from weft.units import Bytes, Seconds

# Far more than the parameters and states of the decoder take.
FLAT = Measures(Seconds(1.0), Bytes(10**10), Seconds(0.1), Seconds(0.0))


@cache
def floors() -> Floors:
    return begun(decoder(8), "h100x4").floors


def estimated(point: Point, found: Measures = FLAT, of: Floors | None = None) -> Measures:
    """The measures of a pipeline on ranks that take `found` without its stages."""
    flat = replace(point, stages=1, schedule="", turns=1)
    return in_stages(point, flat, found, of or floors())


def staged(stages: int, micro_batches: int, schedule: str = "1f1b", turns: int = 1) -> Point:
    return Point(1, 1, stages, "data", micro_batches, schedule, turns=turns)


@pytest.mark.parametrize("schedule", ["", "gpipe", "1f1b", "zero_bubble"])
def test_two_stages_share_the_work(schedule: str) -> None:
    """With many micro-batches a step takes about half as long, never less."""
    found = estimated(staged(2, 256, schedule))
    assert 0.5 <= found.seconds < 0.6
    assert found.seconds < estimated(staged(2, 1, schedule)).seconds <= 1.5


@pytest.mark.parametrize("turns", [1, 2])
def test_few_micro_batches_leave_stages_idle(turns: int) -> None:
    schedule = "1f1b" if turns == 1 else "interleaved"
    many, some, few = (estimated(staged(2, m, schedule, turns)) for m in (16, 4, 2))
    assert many.seconds < some.seconds < few.seconds
    assert many.idle < some.idle < few.idle
    assert many.exposed == some.exposed == few.exposed


@pytest.mark.parametrize("turns", [1, 2])
def test_one_micro_batch_goes_through_all_stages_one_after_the_other(turns: int) -> None:
    """However many turns: a step takes as long as on the ranks of one stage, but for gradients, which are shared."""
    schedule = "1f1b" if turns == 1 else "interleaved"
    found = estimated(staged(2, 1, schedule, turns))
    assert found.seconds == pytest.approx(0.9 + 0.1 / 2, rel=0.03)


def test_each_part_of_a_rank_gathers_ahead_by_itself() -> None:
    """Two blocks ahead in the forward of each part, and in its backward; all blocks of a stage at most."""
    of = begun(decoder(8), "h100x8", base=Strategy(zero=Zero(3))).floors
    block = of.facts.parameters / 8
    few, more, many = (
        Point(2, stages=2, zero=3, micro_batches=8, schedule="interleaved", turns=turns)
        for turns in (1, 2, 4)
    )
    whole = [_gathered_ahead(each, of) for each in (few, more, many)]
    assert whole == pytest.approx([2 * block, 4 * block, 4 * block])
    assert _gathered_ahead(replace(few, zero=2), of) == 0


def test_other_orders_fill_a_part_of_the_bubble() -> None:
    plain, filled = estimated(staged(4, 4)), estimated(staged(4, 4, "zero_bubble"))
    assert 0.25 < filled.seconds < plain.seconds
    assert filled.idle < plain.idle


def test_what_ranks_wait_for_and_idle_time_are_shared() -> None:
    """Beside what stages leave idle."""
    waits = replace(FLAT, exposed=Seconds(0.5), idle=Seconds(0.25))
    found, busy = (
        estimated(staged(2, 256), each) for each in (waits, replace(waits, idle=Seconds(0.0)))
    )
    assert found.exposed == pytest.approx(0.25)
    assert found.idle - busy.idle == pytest.approx(0.125)
    assert found.computing > 0
    assert found.seconds >= estimated(staged(2, 256)).seconds - 0.01


def test_gradients_that_are_added_up_have_no_bubble() -> None:
    """Of two steps that take as long, the one that mostly waits for exchanges loses less of its time to few."""
    works, waits = replace(FLAT, exposed=Seconds(0.0)), replace(FLAT, exposed=Seconds(0.9))
    few, many = staged(2, 2), staged(2, 256)
    lost = [estimated(few, each).seconds - estimated(many, each).seconds for each in (works, waits)]
    assert 0 < lost[1] < 0.2 * lost[0]


@pytest.mark.parametrize("schedule", ["", "gpipe", "1f1b", "zero_bubble"])
def test_more_stages_hold_less(schedule: str) -> None:
    assert estimated(staged(4, 8, schedule)).memory < estimated(staged(2, 8, schedule)).memory


def test_all_forwards_first_hold_the_most_micro_batches() -> None:
    first, turn = (estimated(staged(2, 8, schedule)).memory for schedule in ("gpipe", "1f1b"))
    assert turn < first
    # With as many micro-batches as stages, both hold all of them.
    first, turn = (estimated(staged(2, 2, schedule)).memory for schedule in ("gpipe", "1f1b"))
    assert turn <= first


def test_what_may_be_in_flight_counts_where_it_is_fixed() -> None:
    fixed = begun(decoder(8), "h100x4", base=Strategy(in_flight=(1, 1))).floors
    one, free = estimated(staged(2, 8), of=fixed), estimated(staged(2, 8))
    assert one.memory < free.memory
    assert one.seconds == free.seconds


def test_an_estimate_is_near_the_plan() -> None:
    """Of a small decoder in two stages, by a plan of it without them."""
    search, flat = begun(decoder(4), "h100x2"), Point(1, micro_batches=4)
    point = replace(flat, stages=2, schedule="1f1b")
    found = in_stages(point, flat, planned(search, flat), search.floors)
    assert found.seconds == pytest.approx(planned(search, point).seconds, rel=0.2)


def test_bytes_of_a_plan_correct_others_alike() -> None:
    """Of the same schedule and ways to save memory, with other stages; beside parameters and states."""
    point, found = staged(2, 8), Pipelines(floors())
    flat = replace(point, stages=1, schedule="")
    about = found.measures(point, flat, FLAT)
    assert about == estimated(point)
    assert not found.is_planned(point)
    states = floors().states_of(point)
    twice = replace(about, memory=Bytes(int(2 * about.memory - states)))
    found.learn(point, flat, FLAT, twice)
    assert found.is_planned(staged(4, 8))
    assert found.measures(point, flat, FLAT).memory == pytest.approx(twice.memory, abs=2)
    more, again = staged(4, 8), replace(point, recompute=8)
    beside = estimated(more).memory - floors().states_of(more)
    four = found.measures(more, replace(more, stages=1, schedule=""), FLAT)
    assert four.memory == pytest.approx(floors().states_of(more) + 2 * beside, abs=2)
    assert not found.is_planned(again)
    assert found.measures(again, replace(again, stages=1, schedule=""), FLAT) == estimated(again)


def test_parameters_in_shards_are_narrowed_in_shards() -> None:
    """With ZeRO 3 casts of what a rank has are gathered; with ZeRO 2 they are whole."""
    narrow = begun(decoder(8, "bf16"), "h100x4", base=Strategy(precision="bf16")).floors
    point = Point(2, stages=2, micro_batches=8, schedule="1f1b")
    small = replace(FLAT, memory=Bytes(int(narrow.states_of(Point(2)) + 10**6)))
    memory = [
        estimated(replace(point, zero=zero), small, narrow).memory
        - narrow.states_of(replace(point, zero=zero))
        for zero in (2, 3)
    ]
    assert memory[0] < memory[1]
