"""The order in which points are planned."""

from __future__ import annotations

import pytest

import weft
from search.jobs import begun, decoder
from weft.search.enumeration import Enumeration
from weft.search.evaluation.measures import Measures
from weft.search.order.estimates import Estimates
from weft.search.order.frontier import Frontier
from weft.search.pace import Pace
from weft.search.space.fixed import space_of
from weft.search.space.point import Point
from weft.search.state import SearchState
from weft.units import Seconds

# Above what the device reserves. All points with ZeRO 3 take more than these bytes by small steps, but for those with
# blocks that run again.
LIMIT = 310_000
RESERVE = begun(decoder(8), "h100x2").floors.reserve
# With that fixed there are few points.
FEW = weft.Strategy(stages=1, zero=weft.Zero(3))


@pytest.mark.parametrize("until", [0.0, 1.0])
def test_the_first_plan_has_room_where_no_strategy_by_hand_has(until: float) -> None:
    """Points that were not looked at for want of time are before they are planned; others come first then."""
    search = begun(decoder(8), "h100x2", RESERVE + LIMIT, weft.Strategy(zero=weft.Zero(3)))
    points = Enumeration(search)
    points.arrange(space_of(search.facts, False))
    search.until = until
    points.plan_points(True, likely=True)
    assert search.planned == 0
    points.plan_points(False, likely=True)
    assert search.planned
    assert search.best is not None
    assert search.best[2].memory <= RESERVE + LIMIT


@pytest.mark.thorough
def test_blocks_run_again_or_wait_before_slower_strategies_by_hand() -> None:
    """Without a limit ZeRO 3 is the quickest by hand; under one tensor parallel is, and four times as slow."""
    search = begun(decoder(8), "h100x2", RESERVE + 330_000, weft.Strategy(stages=1))
    points = Enumeration(search)
    points.arrange(space_of(search.facts, True))
    points.plan_points(True, likely=True)
    assert search.planned == 0
    points.plan_points(False, likely=True)
    assert search.best is not None
    name, strategy, found = search.best
    assert strategy.recompute or strategy.offload, name
    points.plan_points(True, likely=False)
    assert search.best[2] == found
    assert not points.is_crowded(found.seconds, times=9.0)
    assert points.is_crowded(found.seconds, times=1.0)


def test_the_first_plan_is_one_that_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the quickest would take longer than there is, the quickest of those that were looked at and would not."""
    search = begun(decoder(8), "h100x2")
    points = Enumeration(search)
    points.arrange(space_of(search.facts, False))
    others = [Point(2, zero=3), Point(2, micro_batches=2)]
    for point in others:
        search.estimates.refined(point)
    wanted = min(others, key=search.estimates.seconds)
    monkeypatch.setattr(Pace, "in_time", lambda _, point: point in others)
    monkeypatch.setattr(Pace, "affords", lambda _: not search.planned)
    points.plan_points(True, likely=True)
    assert list(search.points) == [wanted]


def test_those_by_hand_wait_for_far_quicker_ones_that_were_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = begun(decoder(8), "h100x2")
    points = Enumeration(search)
    points.arrange(space_of(search.facts, False))
    monkeypatch.setattr(Enumeration, "is_crowded", lambda *_: True)
    monkeypatch.setattr(Enumeration, "_with_blocks_again", lambda *_: None)
    hands, others = search.fronts
    slow, quick = Seconds(1e3), Seconds(1e-9)
    assert not points._waits(hands, Point(2), slow)
    search.estimates.refined(Point(1, micro_batches=2))
    known = others.known(lambda _: True)
    assert known is not None
    assert known.stages == 2
    assert points._waits(hands, Point(2), slow)
    assert not points._waits(hands, Point(2), quick)
    assert not points._waits(others, Point(2), slow)


@pytest.mark.parametrize("blocks", [4, 8])
@pytest.mark.parametrize("moves", [1, 3])
def test_few_moves_find_what_fits_alone(blocks: int, moves: int) -> None:
    """Data parallel with all blocks that run again under ZeRO 3, of a step with small steps and without."""
    step, topology = decoder(blocks), "h100x2"
    search = begun(step, topology)
    least = search.evaluator.of(search.strategy(Point(2, zero=3, recompute=blocks)))
    plain = search.evaluator.of(search.strategy(Point(2, zero=3)))
    assert isinstance(least, Measures)
    assert isinstance(plain, Measures)
    assert least.memory < plain.memory
    found = weft.search(step, topology, moves=moves, memory_limit=least.memory, planners=0)
    assert found.best.recompute


def test_points_that_were_not_looked_at_stand_roughly_where_time_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where nothing has room and time is up, the one that takes the least of those that were looked at is planned."""
    search = begun(decoder(8), "h100x2", RESERVE + 1000)
    points = Enumeration(search)
    points.arrange(space_of(search.facts, False))
    search.fronts = [begun_front(search, each) for each in (True, False)]
    small = Point(2, zero=3)
    search.estimates.refined(small)
    search.estimates.refined(Point(2))
    looks = dict(search.estimates.looks)
    monkeypatch.setattr(Pace, "may_look_to_the_end", lambda _: False)
    monkeypatch.setattr(Pace, "may_plan", lambda *_: False)
    assert points._first(search.fronts[0]) == small
    assert search.estimates.looks == looks


def begun_front(search: SearchState, by_hand: bool) -> Frontier:
    """All points, also those that surely lack room."""
    points = space_of(search.facts, False)
    points = points.where(points.by_hand == by_hand)
    return Frontier(points, search.floors.least(points), search.estimates)


def test_points_that_are_planned_are_not_left() -> None:
    """Whoever plans them: looks at kinds, the cheapest layouts, or their turn. All others are counted, once."""
    search = begun(decoder(2), "h100x2", base=FEW)
    points = Enumeration(search)
    points.arrange(space_of(search.facts, False))
    count = len(search.by_hand) + len(search.fronts[1]) + sum(search.skipped.values())
    points.look_at_kinds()
    assert search.points
    points.plan_cheapest()
    for by_hand in (True, False):
        points.plan_points(by_hand, likely=False)
    planned = len(search.points)
    assert planned + sum(search.skipped.values()) + sum(map(len, search.fronts)) == count
    assert search.estimates.known == planned


def test_points_that_were_looked_at_and_are_slower_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before moves those within a tenth of the best are looked at, and none of them hides the next."""
    search = begun(decoder(8), "h100x2", base=FEW)
    points = Enumeration(search)
    points.arrange(space_of(search.facts, False))
    points._plan_point(search.fronts[0], Point(2))
    before = [len(front) for front in search.fronts]

    def slower(estimates: Estimates, point: Point) -> float:
        estimates.refined(point)
        return 1.05 * search.quickest

    monkeypatch.setattr(Estimates, "seconds", slower)
    points.plan_points(False, likely=True)
    assert list(search.points) == [Point(2)]
    assert [len(front) for front in search.fronts] == before
    assert len(search.estimates.looks) > 1


def test_others_that_were_looked_at_may_be_known_to_be_quicker() -> None:
    search = begun(decoder(8), "h100x2")
    points = Enumeration(search)
    points.arrange(space_of(search.facts, False))
    assert not points._knows_quicker()
    search.estimates.refined(Point(1, micro_batches=2))
    assert points._knows_quicker()


def test_others_come_before_moves_where_those_by_hand_lack_room() -> None:
    """Of a step that is planned whole: ZeRO 3 of two micro-batches has room, and quicker ones have none."""
    for limit in (None, RESERVE + 170_000):
        search = begun(decoder(3), "h100x2", limit)
        points = Enumeration(search)
        points.arrange(space_of(search.facts, False))
        points._plan_point(search.fronts[0], Point(2, zero=3, micro_batches=2))
        assert points.others_are_better() == (limit is not None)
