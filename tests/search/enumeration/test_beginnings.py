"""The beginning of a search: looks at kinds, at what takes little memory, and the cheapest layouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np
import pytest

import weft
from search.jobs import (
    arranged,
    begun,
    decoder,
    layers,
    least_memory_of,
    many_classes,
    reserve,
)
from weft.search import budget
from weft.search.budget import Budget
from weft.search.enumeration.beginnings import Beginnings
from weft.search.enumeration.room import Room
from weft.search.evaluation.measures import Refused
from weft.search.order.estimates import Estimates
from weft.search.pace import Pace
from weft.search.record.record import Learned
from weft.search.space.point import Point
from weft.search.space.points import Points, kinds_of
from weft.search.state import SearchState

# Above what the device reserves: the quickest strategies by hand take more.
LIMIT = 330_000
# With that fixed there are few points.
FEW = weft.Strategy(stages=1, zero=weft.Zero(3))


def timed(search: SearchState, seconds: float = 1e6) -> SearchState:
    """The search, with a budget of seconds."""
    search.budget = Budget.of(seconds, None)
    return search


def test_one_point_of_each_kind_is_looked_at() -> None:
    """By small steps, so that none is planned; others are not looked at."""
    search = timed(arranged(decoder(8), "h100x2", base=FEW))
    Beginnings(search).look_at_kinds()
    assert not search.planned
    points = search.by_hand
    looked_at = [search.estimates.looked_at(each) for each in points]
    assert set(kinds_of(points)[looked_at]) == set(kinds_of(points))
    assert not all(looked_at)


def test_without_small_steps_one_point_of_each_kind_is_planned() -> None:
    search = timed(arranged(layers(), "h100x2"))
    Beginnings(search).look_at_kinds()
    kinds = kinds_of(Points.of(tuple(search.points))).tolist()
    assert sorted(kinds) == sorted(set(kinds_of(search.by_hand).tolist()))


def test_of_points_about_as_quick_one_of_few_micro_batches_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = arranged(layers(), "h100x2")
    points = [Point(2, micro_batches=count) for count in (8, 2, 4)]
    for quickest, wanted in ((1.0, points[1]), (1e-3, points[0])):
        rough = np.array([quickest, 1.01, 1.02])
        monkeypatch.setattr(Estimates, "rough", lambda *_, rough=rough: rough)
        (found,) = Beginnings(search)._quick_and_cheap(Points.of(points))
        assert found == wanted


@final
@dataclass
class Looks:
    """Stands in for looks that take a second each, and say that plans take some.

    Attributes:
        seconds: of each plan.
        now: by the clock of budgets.
        points: that were looked at.
    """

    seconds: float
    now: float = 0.0
    points: list[Point] = field(default_factory=list)

    def patch(self, patched: pytest.MonkeyPatch) -> None:
        """Put it in the place of looks and of the clock."""
        patched.setattr(budget, "monotonic", lambda: self.now)
        patched.setattr(Estimates, "refined", lambda _, point: self._look(point))
        patched.setattr(Estimates, "has_room", lambda *_: True)
        patched.setattr(Estimates, "seconds_of_plan", lambda *_: self.seconds)

    def _look(self, point: Point) -> object:
        self.points.append(point)
        self.now += 1.0
        return point


@pytest.mark.parametrize(("plan", "looks"), [(0.5, 9), (6.5, 3), (20.0, 1)])
def test_time_for_a_plan_of_the_best_is_not_spent_on_looks(
    monkeypatch: pytest.MonkeyPatch, plan: float, looks: int
) -> None:
    """Of ten seconds; what comes after looks at all kinds is left out then."""
    search, stand_in, after = arranged(layers(), "h100x2"), Looks(plan), list[int]()
    kinds = len(set(kinds_of(search.by_hand).tolist()))
    stand_in.patch(monkeypatch)
    timed(search, 10.0)
    monkeypatch.setattr(Beginnings, "look_at_smallest", lambda _: None)
    monkeypatch.setattr(Room, "quickest_lacks_room", lambda _: True)
    monkeypatch.setattr(Room, "with_blocks_again", lambda _: after.append(1))
    monkeypatch.setattr(Pace, "affords", lambda _: True)
    Beginnings(search).look_at_kinds()
    assert len(stand_in.points) == min(looks, kinds)
    assert bool(after) == (looks >= kinds)


@pytest.mark.parametrize("roomy", [False, True])
def test_small_ones_come_first_and_blocks_that_run_again_where_the_quickest_lacks_room(
    monkeypatch: pytest.MonkeyPatch, roomy: bool
) -> None:
    search, order = timed(arranged(layers(), "h100x2")), list[str]()
    looks = Looks(0.5)
    looks.patch(monkeypatch)
    monkeypatch.setattr(Room, "quickest_lacks_room", lambda _: not roomy)
    monkeypatch.setattr(Room, "with_blocks_again", lambda _: order.append("blocks again"))
    monkeypatch.setattr(Beginnings, "look_at_smallest", lambda _: order.append("smallest"))
    Beginnings(search).look_at_kinds()
    assert looks.points
    assert order == (["smallest"] if roomy else ["smallest", "blocks again"])


def test_of_a_step_without_small_ones_the_smallest_is_planned() -> None:
    """All blocks run again under ZeRO 3, in as few micro-batches as have room by estimate."""
    search = arranged(decoder(3), "h100x2", reserve() + LIMIT // 3)
    Beginnings(search).look_at_smallest()
    (point,) = search.points
    assert (point.recompute, point.zero, point.ranks) == (3, 3, 2)
    fewer = [each for each in Room(search).blocks_again() if each.zero == 3]
    roomy = search.estimates.may_have_room
    assert not any(roomy(each) and each.micro_batches < point.micro_batches for each in fewer)


def test_a_search_of_so_many_moves_plans_the_smallest_whole() -> None:
    search = arranged(decoder(8), "h100x2", reserve() + LIMIT)
    Beginnings(search).look_at_smallest()
    assert [(each.recompute, each.zero) for each in search.points] == [(8, 3)]


def test_the_smallest_are_on_all_ranks() -> None:
    small = Beginnings(arranged(decoder(3), "h100x4", reserve() + LIMIT))._smallest()
    assert {(each.data, each.zero, each.recompute) for each in small} == {(4, 3, 3)}


@pytest.mark.parametrize(("roomy", "wanted"), [((1, 2), 1), ((2,), 2), ((), 2)])
def test_of_the_smallest_that_have_room_the_one_of_the_fewest_micro_batches_is_planned(
    monkeypatch: pytest.MonkeyPatch, roomy: tuple[int, ...], wanted: int
) -> None:
    search = arranged(decoder(3), "h100x2")
    small = [Point(2, zero=3, recompute=3, micro_batches=count) for count in (2, 1)]
    monkeypatch.setattr(Estimates, "may_have_room", lambda _, each: each.micro_batches in roomy)
    Beginnings(search)._plan_smallest(Points.of(small))
    assert [each.micro_batches for each in search.points] == [wanted]
    Beginnings(search)._plan_smallest(Points.of(()))
    assert len(search.points) == 1


@pytest.mark.parametrize(("roomy", "count"), [(True, 1), (False, 3)])
def test_by_small_steps_few_of_the_smallest_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, roomy: bool, count: int
) -> None:
    """Until one has room, three at most."""
    search = timed(arranged(decoder(8), "h100x2", reserve() + LIMIT))
    small = [Point(2, zero=3, recompute=8, micro_batches=each) for each in (1, 2, 4, 8)]
    looked_at = list[Point]()
    monkeypatch.setattr(Beginnings, "_smallest", lambda _: Points.of(small))
    monkeypatch.setattr(Estimates, "seconds", lambda _, point: looked_at.append(point))
    monkeypatch.setattr(Estimates, "has_room", lambda *_: roomy)
    Beginnings(search).look_at_smallest()
    assert len(set(looked_at)) == len(looked_at) == count
    assert not search.planned


def test_where_the_quickest_has_room_nothing_small_is_looked_at() -> None:
    search = arranged(decoder(3), "h100x2")
    Beginnings(search).look_at_smallest()
    assert not search.planned


def test_the_cheapest_are_tried_when_kinds_were_looked_at() -> None:
    """As a search of some seconds does: data parallel may be planned by then."""
    found = arranged(many_classes(), "flexflow-p100x4")
    Beginnings(found).look_at_kinds()
    Beginnings(found).plan_cheapest()
    assert found.best is not None
    name, strategy, _ = found.best
    assert name == "data 4; cheapest layouts"
    assert not strategy.signatures


def test_the_cheapest_are_of_data_parallel_and_told_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search, told = arranged(layers(), "h100x2"), list[int]()
    monkeypatch.setattr(search, "_told", lambda state: told.append(state.planned))
    Beginnings(search).plan_cheapest()
    assert list(search.points) == [Point(2)]
    tried = {each.name: each for each in search.result().tried}
    assert any("cheapest layouts" in each for each in tried)
    # The layer behind the loss has a row for each class.
    rows = tried["data 2; vocabularies split"]
    assert rows.by_hand
    assert rows.strategy.parameters["2.weight"] == weft.split(0)
    assert "0.weight" not in rows.strategy.parameters
    assert len(told) == 3
    assert told[0] == 1


@pytest.mark.parametrize("divided", [True, False])
def test_vocabularies_are_split_where_ranks_divide_them(divided: bool) -> None:
    search = arranged(layers(), "h100x2" if divided else "h100x4")
    Beginnings(search).plan_cheapest()
    names = [each.name for each in search.result().tried]
    assert any("cheapest layouts" in each for each in names)
    assert any("vocabularies split" in each for each in names) == divided


@pytest.mark.parametrize(
    "why", ["", "no time", "no look", "known before", "too few samples", "fixed"]
)
def test_the_cheapest_are_left_out(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """If plans take long, or are fixed otherwise, none can be looked at, or an earlier search went on from them."""
    base = FEW if why == "fixed" else weft.Strategy()
    search = timed(arranged(decoder(8), "h100x2", base=base), seconds=1000.0)
    monkeypatch.setattr(Estimates, "seconds_of_plan", lambda *_: 900.0 if why == "no time" else 0.0)
    if why == "no look":
        monkeypatch.setattr(Pace, "may_look", lambda _: False)
    elif why == "known before":
        # With something else fixed: the strategy of the point is none that was planned.
        search.learned = Learned(points={Point(2): Refused("fixed otherwise")})
    elif why == "too few samples":
        monkeypatch.setitem(vars(search.facts), "samples", 1)
    Beginnings(search).plan_cheapest()
    assert bool(search.points) == (not why)


@pytest.mark.parametrize("more", [-1, 0])
def test_of_what_surely_lacks_room_no_layouts_are_planned(
    monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    """By its floor, before small steps are planned."""
    limit = int(least_memory_of(begun(decoder(8), "h100x2").floors, Point(2))) + more
    search, looked_at = timed(arranged(decoder(8), "h100x2", limit)), list[Point]()
    monkeypatch.setattr(Estimates, "refined", lambda _, point: looked_at.append(point))
    assert all(map(len, search.fronts))
    Beginnings(search).plan_cheapest()
    assert looked_at == ([] if more else [Point(2)])
    assert not search.points
