"""What there is time for, by a clock that tests set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import pytest

import weft
from search.jobs import begun, decoder, layers
from weft.search import budget
from weft.search.budget import Budget
from weft.search.evaluation.evaluator import Evaluator
from weft.search.evaluation.measures import Measures
from weft.search.order.estimates import Estimates
from weft.search.pace import Pace
from weft.search.record.record import Learned
from weft.search.space.point import Point
from weft.search.state import SearchState

QUICK = replace(weft.data_parallel(), grid=(2,))
SLOW = replace(QUICK, micro_batches=8)
# Seconds of each search by the clock.
SECONDS = 10.0


@final
@dataclass
class Clock:
    """Stands in for the monotonic clock.

    Attributes:
        now: seconds since the search began.
    """

    now: float = 0.0

    def __call__(self) -> float:
        """Seconds, as the monotonic clock says them."""
        return 100.0 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of budgets."""
    found = Clock()
    monkeypatch.setattr(budget, "monotonic", found)
    return found


def timed(blocks: int = 0, limit: int | None = None) -> Pace:
    """The pace of a search of ten seconds: of two layers, or of a decoder of so many blocks."""
    found = begun(decoder(blocks) if blocks else layers(), "h100x2", limit)
    found.budget = Budget.of(SECONDS, None)
    return Pace(found)


def test_half_of_what_is_left_goes_to_the_body() -> None:
    found = begun(layers(), "h100x2")
    pace = Pace(found)
    with pace.until_half():
        assert found.until == 0.5
        with pace.until_half():
            assert found.until == 0.25
    assert found.until == 1.0
    with pytest.raises(ValueError, match="here"), pace.until_half():
        raise ValueError("here")
    assert found.until == 1.0


def test_a_budget_ends() -> None:
    """By its moves, by its time, and where it is said to be used up; a plan that is known costs nothing."""
    found = begun(layers(), "h100x2")
    pace = Pace(found)
    assert pace.affords()
    found.budget = Budget.of(1.0, 2)
    found.plan("slow", SLOW)
    found.plan("again", SLOW)
    assert pace.affords()
    found.plan("quick", QUICK)
    assert not pace.affords()
    found.budget = Budget.of(1e6, None)
    assert pace.affords()
    assert pace.may_plan(1e5)
    assert not pace.may_plan(2e6)
    found.end()
    assert not pace.affords()


def test_what_goes_on_now_ends_before_the_whole(clock: Clock) -> None:
    pace = timed()
    pace.state.until = 0.5
    clock.now = 4.0
    with pace.until_half():
        assert pace.state.until == pytest.approx(0.45)
    assert pace.may_plan()
    assert pace.may_plan(5.0)
    clock.now = 6.0
    assert not pace.may_plan()
    pace.state.until = 1.0
    assert pace.may_plan()


def test_the_next_plan_takes_as_long_as_the_longest_of_the_last_three(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the best was planned elsewhere it is planned once more at the end, which takes time as well."""
    took = iter((9.0, 2.0, 3.0, 1.0, 1.0))
    monkeypatch.setattr(Evaluator, "took", lambda *_: next(took))
    pace = timed()
    found = pace.state
    for count in (1, 2, 4, 8):
        found.plan(f"{count}", replace(QUICK, micro_batches=count))
    clock.now = 6.5
    assert pace.affords()
    clock.now = 7.5
    assert not pace.affords()
    clock.now = 6.5
    assert found._best is not None
    found._best = (*found._best[:2], None)
    assert not pace.affords()


def test_one_point_is_planned_in_any_case_and_until_one_fits_others_in_time(clock: Clock) -> None:
    pace = timed(limit=1)
    found = pace.state
    clock.now = 2 * SECONDS
    assert pace.must_plan()
    assert pace.goes_on()
    found.points[Point(2)] = found.plan("quick", QUICK)
    assert not pace.must_plan()
    assert not pace.goes_on()
    # What the last ones took would be too long, if one fitted.
    found._took.append(SECONDS)
    clock.now = SECONDS / 2
    assert found.best is None
    assert not pace.affords()
    assert pace.goes_on()


def test_once_something_fits_no_plan_is_begun_that_would_end_late(clock: Clock) -> None:
    pace = timed()
    pace.state.plan("quick", QUICK)
    assert not pace.must_plan()
    assert pace.goes_on()
    pace.state._took.append(SECONDS)
    assert not pace.goes_on()
    clock.now = 2 * SECONDS
    assert not pace.goes_on()


def test_a_point_is_planned_in_time_whose_plan_ends_or_is_known(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Estimates, "seconds_of_plan", lambda *_: 3.0)
    pace, point = timed(), Point(2)
    clock.now = 6.5
    assert pace.in_time(point)
    clock.now = 7.5
    assert not pace.in_time(point)
    # An earlier search has planned it.
    found = pace.state
    answer = found.evaluator.of(found.strategy(point))
    assert isinstance(answer, Measures)
    assert not pace.in_time(point)
    learned = Learned(points={point: answer})
    second = SearchState(found.evaluator, found.floors, found.budget, learned)
    assert Pace(second).in_time(point)


def test_a_best_that_is_planned_once_more_takes_time_from_points(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Estimates, "seconds_of_plan", lambda *_: 3.0)
    monkeypatch.setattr(SearchState, "seconds_at_end", lambda *_: 2.0)
    pace = timed()
    clock.now = 4.5
    assert pace.in_time(Point(2))
    clock.now = 5.5
    assert not pace.in_time(Point(2))


def test_before_any_plan_half_of_the_time_is_for_looks(clock: Clock) -> None:
    pace = timed()
    pace.state.until = 0.8
    clock.now = 3.5
    assert pace.may_look()
    clock.now = 4.5
    assert not pace.may_look()
    pace.state.plan("quick", QUICK)
    assert pace.may_look()
    clock.now = 8.5
    assert not pace.may_look()


def test_where_nothing_fits_small_steps_are_planned_to_the_end(clock: Clock) -> None:
    """Also when what goes on now has ended; a step of few blocks has no small ones."""
    pace = timed(8)
    pace.state.until = 0.4
    clock.now = SECONDS - 1
    assert not pace.may_look()
    assert pace.may_look_to_the_end()
    clock.now = SECONDS + 1
    assert not pace.may_look_to_the_end()
    clock.now = 0.0
    pace.state.budget = Budget.of(1.0, 1)
    assert pace.may_look_to_the_end()
    pace.state._keys.add("another")
    assert not pace.may_look_to_the_end()
    assert not timed().may_look_to_the_end()
