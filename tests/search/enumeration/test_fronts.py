"""The points that are left: those by hand and others, without what was planned or cannot be the best."""

from __future__ import annotations

import pytest

import weft
from search.jobs import arranged, begun, decoder, layers
from weft.search.enumeration.beginnings import Beginnings
from weft.search.enumeration.enumeration import Enumeration
from weft.search.enumeration.room import NO_ROOM, SLOWER, Fronts
from weft.search.evaluation.evaluator import Evaluator
from weft.search.pace import Pace
from weft.search.space.fixed import space_of
from weft.search.space.point import Point
from weft.search.state import SearchState
from weft.units import Seconds

# With that fixed there are few points.
FEW = weft.Strategy(stages=1, zero=weft.Zero(3))


def test_points_that_are_planned_are_not_left() -> None:
    """Whoever plans them: looks at kinds, the cheapest layouts, or their turn. All others are counted, once."""
    search = arranged(decoder(2), "h100x2", base=FEW)
    count = len(search.by_hand) + len(search.fronts[1]) + sum(search.skipped.values())
    Beginnings(search).look_at_kinds()
    assert search.points
    Beginnings(search).plan_cheapest()
    for by_hand in (True, False):
        Enumeration(search).plan_points(by_hand, likely=False)
    planned = len(search.points)
    assert planned + sum(search.skipped.values()) + sum(map(len, search.fronts)) == count
    assert search.estimates.known == planned


def test_each_point_that_may_have_room_is_in_one_front() -> None:
    points = space_of(begun(decoder(2), "h100x2").facts, False)
    least = begun(decoder(2), "h100x2").floors.memory(points)
    limit = int(least.min() + least.max()) // 2
    search = begun(decoder(2), "h100x2", limit)
    floors = search.floors
    Fronts(search).arrange(points)
    hands, others = (front.points for front in search.fronts)
    assert len(hands)
    assert len(others)
    assert hands.by_hand.all()
    assert not others.by_hand.any()
    assert set(search.by_hand) == set(points.where(points.by_hand))
    assert 0 < search.skipped[NO_ROOM] == len(points) - len(hands) - len(others)
    assert all((floors.memory(each) <= limit).all() for each in (hands, others))
    assert search.bound == min(float(floors.least(each).min()) for each in (hands, others))
    assert tuple(Fronts(search).of(each) for each in (True, False)) == search.fronts


def test_without_a_limit_all_have_room() -> None:
    search = arranged(layers(), "h100x2")
    assert search.skipped[NO_ROOM] == 0
    assert sum(map(len, search.fronts)) == len(space_of(search.facts, False))


def test_none_is_left_that_takes_as_long_as_the_best_in_any_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = arranged(layers(), "h100x2")
    fronts, front = Fronts(search), search.fronts[1]
    count, least = len(front), search.floors.least(front.points)
    assert fronts.has_left(front)
    assert len(front) == count
    Fronts(search).plan(search.fronts[0], Point(2))
    monkeypatch.setattr(SearchState, "quickest", Seconds(float(least.max())))
    assert fronts.has_left(front)
    slower = int((least == least.max()).sum())
    assert len(front) == count - slower
    assert search.skipped[SLOWER] == slower
    monkeypatch.setattr(SearchState, "quickest", Seconds(0.0))
    assert not fronts.has_left(front)
    assert search.skipped[SLOWER] == count


def test_a_point_is_planned_learned_from_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever front it is planned from."""
    search, told = arranged(layers(), "h100x2"), list[int]()
    monkeypatch.setattr(search, "_told", lambda state: told.append(state.planned))
    point = Point(2)
    assert search.fronts[0].points.has(point)
    Fronts(search).plan(search.fronts[1], point)
    assert not search.fronts[0].points.has(point)
    assert search.points == {point: search.evaluator.of(search.strategy(point))}
    assert search.estimates.known == 1
    assert told == [1]
    assert search.result().tried[0].by_hand
    Fronts(search).plan(search.fronts[1], point)
    assert search.estimates.known == 1
    assert told == [1, 1]


@pytest.mark.parametrize("in_time", [False, True])
def test_the_next_point_is_planned_ahead_if_there_is_time(
    monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    search, ahead = arranged(layers(), "h100x2"), list[weft.Strategy]()
    following = search.fronts[1].next_point(rough=True)
    assert following is not None
    monkeypatch.setattr(Pace, "in_time", lambda _, point: in_time and point == following)
    monkeypatch.setattr(Evaluator, "ahead", lambda _, strategy: ahead.append(strategy))
    Fronts(search).plan(search.fronts[1], Point(2))
    assert ahead == ([search.strategy(following)] if in_time else [])


def test_the_point_that_is_planned_is_not_planned_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """It still stands in its front where looks at kinds come to it."""
    search = arranged(layers(), "h100x2")
    first = search.fronts[0].next_point(rough=True)
    assert first is not None
    asked = list[str]()
    monkeypatch.setattr(Evaluator, "ahead", lambda _, strategy, *__: asked.append(str(strategy)))
    Fronts(search).plan(search.fronts[0], first)
    assert asked
    assert str(search.strategy(first)) not in asked
