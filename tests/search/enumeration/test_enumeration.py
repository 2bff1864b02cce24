"""Points planned one after the other: which is next, and which are left for later."""

from __future__ import annotations

import pytest

import weft
from search.jobs import arranged, begun, decoder, dense, reserve, step_of
from weft.search.enumeration.enumeration import SLOWER_BEFORE, Enumeration
from weft.search.enumeration.room import Fronts, Room
from weft.search.evaluation.measures import Answer, Measures, Refused
from weft.search.order.estimates import Estimates
from weft.search.order.frontier import Frontier
from weft.search.pace import Pace
from weft.search.record.record import Learned
from weft.search.space.fixed import space_of
from weft.search.space.point import Point
from weft.search.space.points import Points
from weft.search.state import NO_TIME, SearchState
from weft.units import Bytes, Seconds

# Above what the device reserves. All points with ZeRO 3 take more than these bytes by small steps, but for those with
# blocks that run again.
LIMIT = 330_000
# With that fixed there are few points.
FEW = weft.Strategy(stages=1, zero=weft.Zero(3))


@pytest.mark.parametrize("until", [0.0, 1.0])
def test_the_first_plan_has_room_where_no_strategy_by_hand_has(until: float) -> None:
    """Points that were not looked at for want of time are before they are planned; others come first then."""
    search = arranged(decoder(8), "h100x2", reserve() + LIMIT, weft.Strategy(zero=weft.Zero(3)))
    search.until = until
    points = Enumeration(search)
    points.plan_points(True, likely=True)
    assert search.planned == 0
    points.plan_points(False, likely=True)
    assert search.planned
    assert search.best is not None
    assert search.best[2].memory <= reserve() + LIMIT


@pytest.mark.thorough
def test_blocks_run_again_or_wait_before_slower_strategies_by_hand() -> None:
    """Without a limit ZeRO 3 is the quickest by hand; under one tensor parallel is, and four times as slow."""
    search = arranged(
        decoder(8), "h100x2", reserve() + 330_000, weft.Strategy(stages=1), every_rank=True
    )
    points = Enumeration(search)
    points.plan_points(True, likely=True)
    assert search.planned == 0
    points.plan_points(False, likely=True)
    assert search.best is not None
    name, strategy, found = search.best
    assert strategy.recompute or strategy.offload, name
    points.plan_points(True, likely=False)
    assert search.best[2] == found
    assert not Room(search).is_crowded(found.seconds, times=9.0)
    assert Room(search).is_crowded(found.seconds, times=1.0)


def test_the_first_plan_is_one_that_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the quickest would take longer than there is, the quickest of those that were looked at and would not."""
    search = arranged(decoder(8), "h100x2")
    others = [Point(2, zero=3), Point(2, micro_batches=2)]
    for point in others:
        search.estimates.refined(point)
    wanted = min(others, key=search.estimates.seconds)
    monkeypatch.setattr(Pace, "in_time", lambda _, point: point in others)
    monkeypatch.setattr(Pace, "affords", lambda _: not search.planned)
    Enumeration(search).plan_points(True, likely=True)
    assert list(search.points) == [wanted]


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
    search = arranged(decoder(8), "h100x2", reserve() + 1000)
    search.arrange(
        search.by_hand, Seconds(0.0), (begun_front(search, True), begun_front(search, False))
    )
    small = Point(2, zero=3)
    search.estimates.refined(small)
    search.estimates.refined(Point(2))
    looks = dict(search.estimates.looks)
    monkeypatch.setattr(Pace, "may_look_to_the_end", lambda _: False)
    monkeypatch.setattr(Pace, "may_plan", lambda *_: False)
    assert Enumeration(search)._first(search.fronts[0]) == small
    assert search.estimates.looks == looks


def begun_front(search: SearchState, by_hand: bool) -> Frontier:
    """All points, also those that surely lack room."""
    points = space_of(search.facts, False)
    points = points.where(points.by_hand == by_hand)
    return Frontier(points, search.floors.least(points), search.estimates)


def test_points_that_were_looked_at_and_are_slower_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before moves those within a tenth of the best are looked at, and none of them hides the next."""
    search = arranged(decoder(8), "h100x2", base=FEW)
    Fronts(search).plan(search.fronts[0], Point(2))
    before = [len(front) for front in search.fronts]

    def slower(estimates: Estimates, point: Point) -> float:
        estimates.refined(point)
        return 1.05 * search.quickest

    monkeypatch.setattr(Estimates, "seconds", slower)
    Enumeration(search).plan_points(False, likely=True)
    assert list(search.points) == [Point(2)]
    assert [len(front) for front in search.fronts] == before
    assert len(search.estimates.looks) > 1


def test_the_one_with_fewer_blocks_that_run_again_is_planned_where_these_suffice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once: what was asked for goes back behind it, and comes out as it stands after that."""
    search = arranged(decoder(2), "h100x2", base=FEW)
    points, front = Enumeration(search), search.fronts[1]
    every, fewer = Point(2, zero=3, recompute=2), Point(2, zero=3, recompute=1)
    monkeypatch.setattr(Estimates, "just_enough", lambda *_: fewer)
    front.take(every)
    assert points._with_room(front, every) == fewer
    assert front.points.has(every)
    assert points._with_room(front, every) == every


def test_one_with_fewer_blocks_that_is_not_planned_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it stands for went back, and is counted itself."""
    search = arranged(decoder(2), "h100x2", base=FEW)
    search.plan("data 2", weft.data_parallel())
    monkeypatch.setattr(Estimates, "just_enough", lambda *_: Point(2, zero=3, recompute=1))
    monkeypatch.setattr(Estimates, "looked_at", lambda *_: True)
    monkeypatch.setattr(Pace, "in_time", lambda *_: False)
    points, front, every = Enumeration(search), search.fronts[1], Point(2, zero=3, recompute=2)
    for counted in (0, 1):
        front.take(every)
        points._plan_next(front, every)
        assert search.skipped[NO_TIME] == counted


@pytest.mark.parametrize("slower", [False, True])
@pytest.mark.parametrize("in_time", [False, True])
def test_points_that_come_out_are_planned_or_counted(
    monkeypatch: pytest.MonkeyPatch, slower: bool, in_time: bool
) -> None:
    """Those for which there is no time, and those that were far slower in an earlier search, are not planned."""
    search = arranged(decoder(2), "h100x2", base=FEW)
    search.plan("data 2", weft.data_parallel())
    monkeypatch.setattr(Pace, "in_time", lambda *_: in_time)
    monkeypatch.setattr(Learned, "was_slower", lambda *_: slower)
    point = Point(2, zero=3)
    Enumeration(search)._plan_next(search.fronts[0], point)
    assert search.skipped[NO_TIME] == (not in_time)
    assert search.skipped[SLOWER_BEFORE] == (in_time and slower)
    assert list(search.points) == ([point] if in_time and not slower else [])


def test_those_that_are_unlikely_wait_for_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rough estimates those that take twice as long as the best; all where none are left out for moves."""
    search = arranged(decoder(2), "h100x2", base=FEW)
    points = Enumeration(search)
    Fronts(search).plan(search.fronts[0], Point(2))
    for times, unlikely in ((1.9, False), (2.1, True)):
        monkeypatch.setattr(Frontier, "next_seconds", times * search.quickest)
        assert points._is_unlikely(search.fronts[0]) == unlikely
    points.plan_points(True, likely=True)
    assert list(search.points) == [Point(2)]
    points.plan_points(True, likely=False)
    assert len(search.points) > 1


def test_those_wait_that_lack_room_where_others_may_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = arranged(decoder(2), "h100x2", base=FEW)
    points = Enumeration(search)
    monkeypatch.setattr(Room, "lacks_room", lambda *_: True)
    monkeypatch.setattr(Room, "waits", lambda *_: False)
    points.plan_points(True, likely=True)
    assert not search.points
    points.plan_points(True, likely=False)
    assert search.points


def test_those_that_wait_for_others_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    search = arranged(decoder(2), "h100x2", base=FEW)
    monkeypatch.setattr(Room, "waits", lambda *_: True)
    count = len(search.fronts[0])
    Enumeration(search).plan_points(True, likely=True)
    assert not search.points
    assert len(search.fronts[0]) == count


def test_without_looks_a_point_is_planned_only_where_nothing_fits_or_is_known_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = arranged(decoder(2), "h100x2", base=FEW)
    points, front = Enumeration(search), search.fronts[0]
    count = len(front)
    monkeypatch.setattr(Room, "known_elsewhere", lambda *_: True)
    assert points._without_looks(front, likely=True) is None
    assert len(front) == count
    assert points._without_looks(front, likely=False) is not None
    monkeypatch.setattr(Room, "known_elsewhere", lambda *_: False)
    assert points._without_looks(front, likely=True) is not None
    Fronts(search).plan(front, Point(2))
    assert points._without_looks(front, likely=False) is None


@pytest.mark.parametrize(("looked_at", "time"), [(True, False), (False, True), (False, False)])
def test_points_stand_roughly_where_there_is_no_time_for_small_steps(
    monkeypatch: pytest.MonkeyPatch, looked_at: bool, time: bool
) -> None:
    search = arranged(decoder(2), "h100x2", base=FEW)
    monkeypatch.setattr(Estimates, "looked_at", lambda *_: looked_at)
    monkeypatch.setattr(Estimates, "seconds", lambda *_: 1.0)
    monkeypatch.setattr(Estimates, "rough_of", lambda *_: 2.0)
    monkeypatch.setattr(Pace, "may_look_to_the_end", lambda _: time)
    assert Enumeration(search)._seconds(Point(2)) == (1.0 if looked_at or time else 2.0)


def refuse(search: SearchState, count: int) -> None:
    """Have so many points refused."""
    for point in list(search.fronts[1].points)[:count]:
        search.points[point] = Refused("")


@pytest.mark.parametrize(
    ("blocks", "planned", "fits", "fails"),
    [(2, 2, False, False), (2, 3, False, True), (2, 3, True, False), (8, 3, False, False)],
)
def test_three_plans_without_room_are_enough_where_no_small_steps_say_more(
    blocks: int, planned: int, fits: bool, fails: bool
) -> None:
    """Of a step with small steps these say which point has room; once something fits, seconds count."""
    search = arranged(decoder(blocks), "h100x2", base=FEW)
    refuse(search, planned)
    if fits:
        search.plan("data 2", weft.data_parallel())
    assert Enumeration(search)._fails() == fails


def test_then_the_one_that_takes_the_least_memory_is_next() -> None:
    """What came out goes back."""
    search = arranged(decoder(2), "h100x2", base=weft.Strategy(stages=1))
    front = search.fronts[0]
    refuse(search, 3)
    first, before = front.next_point(rough=True), len(front)
    estimates = search.estimates
    memory = estimates.rough_memory(estimates.rough_parts(front.points))
    found = Enumeration(search)._next(front, likely=False)
    assert found is not None
    assert estimates.rough_memory(estimates.rough_parts(Points.one(found))) == memory.min()
    assert first is not None
    assert front.points.has(first)
    assert first != found
    assert len(front) == before - 1


@pytest.mark.parametrize(
    ("room", "looked_at", "smallest"),
    [(True, True, False), (False, True, True), (False, False, False)],
)
def test_where_none_is_known_to_end_in_time_the_first_plan_is_a_small_or_a_quick_one(
    monkeypatch: pytest.MonkeyPatch, room: bool, looked_at: bool, smallest: bool
) -> None:
    """The least memory counts of those that were looked at, where none has room; else how soon a plan ends."""
    search = arranged(decoder(8), "h100x2")
    front, small, quick = search.fronts[0], Point(2, zero=3), Point(2, micro_batches=2)
    if looked_at:
        search.estimates.refined(small)
        search.estimates.refined(Point(2))
    monkeypatch.setattr(Estimates, "seconds_of_plan", lambda _, point: 2.0 - (point == quick))
    monkeypatch.setattr(Estimates, "may_have_room", lambda *_: room)
    monkeypatch.setattr(Estimates, "has_room", lambda *_: False)
    monkeypatch.setattr(Pace, "in_time", lambda *_: False)
    monkeypatch.setattr(Pace, "may_look_to_the_end", lambda _: False)
    monkeypatch.setattr(Pace, "affords", lambda _: False)
    before = len(front)
    assert Enumeration(search)._next(front, likely=False) == (small if smallest else quick)
    assert len(front) == before - 1


# Bytes of a device, above what it reserves and such a step takes.
_LIMIT = 10**10
_AGAIN = Point(2, zero=3, recompute=8)


def taken(times: float, seconds: float = 0.9) -> Measures:
    """The measures of a step of so many seconds that takes so many times the limit."""
    return Measures(Seconds(seconds), Bytes(int(times * _LIMIT)), Seconds(0.0), Seconds(0.0))


def looked_at_after(
    monkeypatch: pytest.MonkeyPatch, search: SearchState, point: Point, answer: Answer
) -> list[tuple[Frontier, Point]]:
    """The looks that follow a plan of a point, where the best takes a second."""
    seen = list[tuple[Frontier, Point]]()
    monkeypatch.setattr(SearchState, "plan", lambda *_: answer)
    monkeypatch.setattr(SearchState, "quickest", 1.0)
    monkeypatch.setattr(Frontier, "look_at", lambda front, point: seen.append((front, point)))
    Enumeration(search)._plan_next(search.fronts[0], point)
    assert search.points == {point: answer}
    return seen


@pytest.mark.parametrize("times", [1.001, 1.099])
def test_a_quick_one_that_lacks_little_room_has_the_one_with_blocks_that_run_again_looked_at(
    monkeypatch: pytest.MonkeyPatch, times: float
) -> None:
    search = arranged(decoder(8), "h100x2", _LIMIT, FEW)
    seen = looked_at_after(monkeypatch, search, Point(2, zero=3), taken(times))
    assert seen == [(search.fronts[1], _AGAIN)]
    assert search.fronts[1].points.has(_AGAIN)


@pytest.mark.parametrize(
    ("point", "answer", "limit"),
    [
        (Point(2, zero=3), taken(1.0), _LIMIT),
        (Point(2, zero=3), taken(1.101), _LIMIT),
        (Point(2, zero=3), taken(1.05, seconds=1.0), _LIMIT),
        (Point(2, zero=3), Refused(""), _LIMIT),
        (Point(2, zero=3), taken(1.05), None),
        (Point(2, zero=3, recompute=4), taken(1.05), _LIMIT),
        (Point(2, zero=3, offload=4), taken(1.05), _LIMIT),
    ],
)
def test_no_other_one_has(
    monkeypatch: pytest.MonkeyPatch, point: Point, answer: Answer, limit: int | None
) -> None:
    """With room, or with far too little; no quicker than the best; refused; without a limit; or so already."""
    search = arranged(decoder(8), "h100x2", limit, FEW)
    assert not looked_at_after(monkeypatch, search, point, answer)


def test_nor_one_without_blocks_or_without_time_for_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    search = arranged(step_of(dense(32, 32, 10), 8, 32), "h100x2", _LIMIT, FEW)
    assert not looked_at_after(monkeypatch, search, Point(2, zero=3), taken(1.05))
    search = arranged(decoder(8), "h100x2", _LIMIT, FEW)
    monkeypatch.setattr(Pace, "looks_in_time", lambda _, point: point != _AGAIN)
    assert not looked_at_after(monkeypatch, search, Point(2, zero=3), taken(1.05))
