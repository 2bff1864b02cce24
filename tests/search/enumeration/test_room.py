"""Questions about tight memory, and about which points are the better beginning."""

from __future__ import annotations

import numpy as np
import pytest

import weft
from search.jobs import arranged, decoder, layers, reserve
from weft.search.enumeration.room import Fronts, Room
from weft.search.order.estimates import Estimates
from weft.search.order.frontier import Frontier
from weft.search.pace import Pace
from weft.search.space.point import Point
from weft.search.space.points import Points
from weft.search.state import SearchState
from weft.units import Seconds

# Above what the device reserves: the quickest strategies by hand take more.
LIMIT = 330_000


def test_those_by_hand_wait_for_far_quicker_ones_that_were_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = arranged(decoder(8), "h100x2")
    monkeypatch.setattr(Room, "is_crowded", lambda *_: True)
    monkeypatch.setattr(Room, "with_blocks_again", lambda *_: None)
    room = Room(search)
    hands, others = search.fronts
    slow, quick = Seconds(1e3), Seconds(1e-9)
    assert not room.waits(hands, Point(2), slow)
    search.estimates.refined(Point(1, micro_batches=2))
    known = others.known(lambda _: True)
    assert known is not None
    assert known.stages == 2
    assert room.waits(hands, Point(2), slow)
    assert not room.waits(hands, Point(2), quick)
    assert not room.waits(others, Point(2), slow)


def test_others_that_were_looked_at_may_be_known_to_be_quicker() -> None:
    search = arranged(decoder(8), "h100x2")
    room = Room(search)
    assert not room._knows_quicker()
    search.estimates.refined(Point(1, micro_batches=2))
    assert room._knows_quicker()


def test_others_come_before_moves_where_those_by_hand_lack_room() -> None:
    """Of a step that is planned whole: ZeRO 3 of two micro-batches has room, and quicker ones have none."""
    for limit in (None, reserve() + 170_000):
        search = arranged(decoder(3), "h100x2", limit)
        Fronts(search).plan(search.fronts[0], Point(2, zero=3, micro_batches=2))
        assert Room(search).others_are_better() == (limit is not None)


def test_the_quickest_by_hand_has_room_or_lacks_it() -> None:
    for limit in (None, reserve() + LIMIT):
        assert Room(arranged(decoder(8), "h100x2", limit)).quickest_lacks_room() == (
            limit is not None
        )


def test_it_is_crowded_where_without_a_limit_the_quickest_would_be_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = arranged(layers(), "h100x2")
    room, asked = Room(search), list[Points]()

    def quickest(_: Estimates, points: Points) -> tuple[Point, Seconds]:
        asked.append(points)
        return Point(2), Seconds(1.0)

    monkeypatch.setattr(Estimates, "quickest", quickest)
    assert not room.is_crowded(Seconds(1.04))
    assert room.is_crowded(Seconds(1.06))
    assert room.is_crowded(Seconds(1.04), times=1.01)
    assert all(each is search.by_hand for each in asked)
    monkeypatch.setattr(Estimates, "quickest", lambda *_: None)
    assert not room.is_crowded(Seconds(1e9))


def test_a_front_lacks_room_where_only_the_other_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    search = arranged(layers(), "h100x2")
    room, (hands, others) = Room(search), search.fronts
    monkeypatch.setattr(Frontier, "has_room", lambda front: front is others)
    assert room.lacks_room(hands)
    assert not room.lacks_room(others)
    # What has no room then waits; what has some does not, and nothing does once something fits.
    for roomy in (True, False):
        monkeypatch.setattr(Estimates, "may_have_room", lambda *_, roomy=roomy: roomy)
        assert room.waits(hands, Point(2), Seconds(1e-9)) == (not roomy)
    Fronts(search).plan(hands, Point(2))
    assert not room.lacks_room(hands)
    assert not room.waits(hands, Point(2), Seconds(1e-9))
    monkeypatch.setattr(Frontier, "has_room", lambda _: False)
    assert not Room(arranged(layers(), "h100x2")).lacks_room(hands)


def test_a_point_of_the_other_front_is_known_once_it_was_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = arranged(layers(), "h100x2")
    room, (hands, others) = Room(search), search.fronts
    monkeypatch.setattr(Frontier, "known", lambda front, _: Point(2) if front is others else None)
    # Also where its plan ends late: that of one that was not looked at may lack room besides.
    monkeypatch.setattr(Pace, "in_time", lambda *_: False)
    assert room.known_elsewhere(hands)
    assert not room.known_elsewhere(others)


def test_those_by_hand_wait_for_quicker_ones_with_blocks_that_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = arranged(layers(), "h100x2")
    room, fewer = Room(search), Point(2, recompute=1)
    monkeypatch.setattr(Room, "is_crowded", lambda *_: True)
    monkeypatch.setattr(Room, "with_blocks_again", lambda _: fewer)
    monkeypatch.setattr(Estimates, "seconds", lambda *_: Seconds(1.0))
    monkeypatch.setattr(Pace, "may_look_to_the_end", lambda _: True)
    assert room.waits(search.fronts[0], Point(2), Seconds(1.1))
    assert not room.waits(search.fronts[0], Point(2), Seconds(0.9))
    monkeypatch.setattr(Pace, "may_look_to_the_end", lambda _: False)
    assert not room.waits(search.fronts[0], Point(2), Seconds(1.1))
    monkeypatch.setattr(Pace, "may_look_to_the_end", lambda _: True)
    monkeypatch.setattr(Room, "is_crowded", lambda *_: False)
    assert not room.waits(search.fronts[0], Point(2), Seconds(1.1))
    monkeypatch.setattr(Room, "is_crowded", lambda *_: True)
    Fronts(search).plan(search.fronts[0], Point(2))
    assert not room.waits(search.fronts[0], Point(2), Seconds(1.1))


def test_of_blocks_that_run_again_the_quickest_is_found_by_looks() -> None:
    search = arranged(decoder(8), "h100x2", reserve() + LIMIT)
    found = Room(search).with_blocks_again()
    assert found is not None
    assert (found.recompute, found.stages, found.tensor, found.offload) == (8, 1, 1, 0)
    assert search.estimates.looked_at(found)
    again = [each for each in Room(search).blocks_again() if search.estimates.looked_at(each)]
    assert found == min(again, key=search.estimates.seconds)
    assert not search.planned


@pytest.mark.parametrize("time", [False, True])
def test_looks_end_where_none_that_was_not_looked_at_should_be_quicker(
    monkeypatch: pytest.MonkeyPatch, time: bool
) -> None:
    """The second turns out to be quicker than all, the third should not be; without time for it the first counts."""
    search = arranged(decoder(8), "h100x2", reserve() + LIMIT)
    again = [Point(2, zero=3, recompute=8, micro_batches=count) for count in (1, 2, 4)]
    rough, found = dict(zip(again, (1.0, 2.0, 3.0), strict=True)), (5.0, 2.5, 0.0)
    seconds, looked_at = dict(zip(again, found, strict=True)), list[Point]()

    def look(_: Estimates, point: Point) -> Seconds:
        looked_at.append(point)
        rough[point] = seconds[point]
        return Seconds(seconds[point])

    monkeypatch.setattr(Room, "blocks_again", lambda _: Points.of(again))
    monkeypatch.setattr(Estimates, "rough", lambda *_: np.array([rough[each] for each in again]))
    monkeypatch.setattr(Estimates, "seconds", look)
    monkeypatch.setattr(Pace, "may_look", lambda _: time)
    assert Room(search).with_blocks_again() == again[int(time)]
    assert looked_at == again[: 1 + time]


def test_where_small_steps_say_nothing_no_blocks_run_again() -> None:
    for step in (layers(), decoder(3)):
        search = arranged(step, "h100x2", reserve() + LIMIT)
        assert Room(search).with_blocks_again() is None
    assert len(Room(search).blocks_again())
    assert not len(Room(arranged(layers(), "h100x2")).blocks_again())


def test_others_are_better_that_are_quicker_by_small_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = arranged(decoder(8), "h100x2", base=weft.Strategy(stages=1, zero=weft.Zero(3)))
    Fronts(search).plan(search.fronts[0], Point(2))
    monkeypatch.setattr(SearchState, "quickest", Seconds(1.0))
    monkeypatch.setattr(Room, "is_crowded", lambda *_: False)
    monkeypatch.setattr(Frontier, "known", lambda *_: Point(2, zero=3))
    for seconds in (0.9, 1.1):
        monkeypatch.setattr(Estimates, "seconds", lambda *_, seconds=seconds: Seconds(seconds))
        assert Room(search).others_are_better() == (seconds < 1)
    monkeypatch.setattr(Room, "is_crowded", lambda *_: True)
    assert Room(search).others_are_better()


def test_what_surely_has_room_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fits so far: of two points that were looked at the quicker one may lack room, or one is far slower."""
    search = arranged(decoder(8), "h100x2")
    quick, sure = Point(2, micro_batches=2), Point(2)
    for point in (quick, sure):
        search.estimates.refined(point)
    monkeypatch.setattr(Estimates, "has_room", lambda _, point: point == sure)
    assert Room(search).safer(search.fronts[0], quick) == (search.fronts[0], sure)
    assert Room(search).safer(search.fronts[0], sure) is None
    assert Room(search).safer(search.fronts[0], Point(2, zero=1)) is None
    monkeypatch.setattr(Estimates, "has_room", lambda *_: True)
    took = {quick: 1.3, sure: 1.0}
    monkeypatch.setattr(Estimates, "seconds", lambda _, point: took.get(point, 9.0))
    assert Room(search).safer(search.fronts[0], quick) == (search.fronts[0], sure)
    took[quick] = 1.2
    assert Room(search).safer(search.fronts[0], quick) is None
    monkeypatch.setattr(Estimates, "has_room", lambda _, point: point == sure)
    monkeypatch.setattr(Pace, "in_time", lambda *_: False)
    assert Room(search).safer(search.fronts[0], quick) is None


def test_one_that_surely_has_room_and_is_far_quicker_than_the_best_comes_before_one_that_may_lack_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There may be no time for both."""
    search = arranged(decoder(8), "h100x2")
    quick, sure = Point(2), Point(1, micro_batches=2)
    Fronts(search).plan(search.fronts[0], Point(2, zero=1))
    for each in (quick, sure):
        search.estimates.refined(each)
    monkeypatch.setattr(Estimates, "has_room", lambda _, point: point == sure)
    took = {quick: search.quickest / 2, sure: search.quickest / 1.3}
    monkeypatch.setattr(Estimates, "seconds", lambda _, point: took.get(point, 9.0))
    assert Room(search).safer(search.fronts[0], quick) == (search.fronts[0], sure)
    took[sure] = search.quickest / 1.2
    assert Room(search).safer(search.fronts[0], quick) is None
    took[sure] = search.quickest / 1.3
    monkeypatch.setattr(Estimates, "has_room", lambda *_: True)
    assert Room(search).safer(search.fronts[0], quick) is None


def test_far_quicker_others_that_may_have_room_come_before_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = arranged(decoder(8), "h100x2")
    room, known = Room(search), Point(1, micro_batches=2)
    Fronts(search).plan(search.fronts[0], Point(2))
    assert not room.others_are_far_quicker()
    search.estimates.refined(known)
    monkeypatch.setattr(Estimates, "has_room", lambda *_: False)
    monkeypatch.setattr(Estimates, "seconds", lambda *_: search.quickest / 1.3)
    assert room.others_are_far_quicker()
    monkeypatch.setattr(Estimates, "seconds", lambda *_: search.quickest / 1.2)
    assert not room.others_are_far_quicker()
