"""Points that should have room, as far as is known before they are planned."""

from __future__ import annotations

from dataclasses import replace

import pytest

import weft
from search.jobs import decoder, enumeration
from weft.search.enumeration import Enumeration
from weft.search.evaluation.measures import Measures
from weft.search.space.fixed import space_of
from weft.search.space.point import Point
from weft.strategy.strategy import Strategy
from weft.units import Bytes, Seconds

# Above what the device reserves. Of all points with ZeRO 3 those of `MICRO` should take the least without recompute:
# 237 kB by floors, 315 by small steps.
LIMIT = 300_000
RESERVE = enumeration(decoder(8), "h100x2").floors.reserve
NOTHING = Seconds(0.0), Seconds(0.0)
MICRO = Point(2, zero=3, micro_batches=2)


def crowded(limit: int, base: Strategy, until: float = 1.0) -> Enumeration:
    """A search under a limit, with `until` 0 without time to look at points before the first plan."""
    found = enumeration(decoder(8), "h100x2", RESERVE + limit, base)
    found.arrange(space_of(found.facts, False))
    found.until = until
    return found


def nobody(_: Enumeration) -> None:
    """Is told what is known."""


def test_points_that_take_more_by_small_steps_have_no_room() -> None:
    estimates = crowded(LIMIT, Strategy()).estimates
    assert estimates.may_have_room(MICRO)
    estimates.refined(MICRO)
    assert not estimates.may_have_room(MICRO)


def test_points_alike_are_corrected_by_the_bytes_of_one() -> None:
    """One that takes more than floors say: one of the same layouts and ZeRO has no room either, another has."""
    estimates = crowded(400_000, Strategy()).estimates
    alike, other = Point(2, zero=3), Point(1, tensor=2, layouts="columns")
    assert estimates.may_have_room(alike)
    assert estimates.may_have_room(other)
    estimates.learn(MICRO, Measures(Seconds(1.0), Bytes(RESERVE + 400_000), *NOTHING))
    assert not estimates.may_have_room(alike)
    assert estimates.may_have_room(other)


@pytest.mark.parametrize("until", [0.0, 1.0])
def test_the_first_plan_has_room_where_no_strategy_by_hand_has(until: float) -> None:
    """What was not looked at for want of time is looked at before it is planned; others come first then."""
    search = crowded(LIMIT, Strategy(zero=weft.Zero(3)), until)
    search.plan_points(True, nobody, likely=True)
    assert search.planned == 0
    search.plan_points(False, nobody, likely=True)
    assert search.planned
    assert search.best is not None
    assert search.best[2].memory <= RESERVE + LIMIT


def test_points_with_all_blocks_again_stand_for_those_with_as_few_as_give_room() -> None:
    """In order, not in the plan: by floors and, once they were looked at, by small steps."""
    estimates, every = crowded(LIMIT, Strategy()).estimates, replace(MICRO, recompute=8)
    alone = enumeration(decoder(8), "h100x2").estimates
    none, least = alone.rough_of(MICRO), alone.rough_of(every)
    assert alone.seconds(every) == alone.seconds_as_it_stands(every)
    estimates.refined(MICRO)
    assert none < estimates.rough_of(every)
    fewer = estimates.just_enough(every)
    assert fewer is not None
    assert 0 < fewer.recompute < 8
    assert estimates.seconds(every) == estimates.seconds_as_it_stands(fewer)
    assert estimates.seconds(every) < estimates.seconds_as_it_stands(every)
    assert least > none
