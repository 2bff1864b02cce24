"""A search: its candidates, what there is time for, who is told, and the result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import pytest

import weft
from search.jobs import arranged, begun, decoder, layers
from weft.errors import UserError
from weft.search import budget
from weft.search.budget import Budget
from weft.search.candidate import Candidate
from weft.search.estimate import Estimates
from weft.search.evaluator import Evaluator
from weft.search.measures import Measures
from weft.search.record import Learned
from weft.search.space import space_of
from weft.search.state import NO_MOVES, NO_ROOM, NO_TIME, SearchState
from weft.search.tuning import FAILED

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


def timed(limit: int | None = None) -> SearchState:
    """A search of ten seconds."""
    found = begun(layers(), "h100x2", limit)
    found.budget = Budget.of(SECONDS, None)
    return found


def elsewhere(found: SearchState) -> None:
    """Have the best be one that another process has planned."""
    assert found.log.best is not None
    found.log.best = replace(found.log.best, whole=None)


def test_points_without_room_are_counted() -> None:
    plain = begun(decoder(2), "h100x2")
    candidates = space_of(plain.facts, every_rank=False)
    least = plain.lower_bounds.memory(candidates)
    found = arranged(decoder(2), "h100x2", int(least.min() + least.max()) // 2)
    left = found.queue.candidates
    assert 0 < len(left) == len(candidates) - found._skipped[NO_ROOM]
    assert found.lower_bounds.may_fit(left).all()
    assert 0 < found.bound == float(found.lower_bounds.least(left).min())
    assert arranged(layers(), "h100x2")._skipped[NO_ROOM] == 0


def test_a_point_is_planned_learned_from_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found, told = arranged(layers(), "h100x2"), list[int]()
    monkeypatch.setattr(found, "_told", lambda state: told.append(state.planned))
    candidate, count = Candidate(2), len(found.queue)
    answer = found.plan_candidate(candidate)
    assert len(found.queue) == count - 1
    assert (
        found.candidates
        == {candidate: answer}
        == {candidate: found.evaluator.of(found.strategy(candidate))}
    )
    assert len(found.estimates.measured) == 1
    assert found.result().tried[0].by_hand
    found.plan_candidate(candidate)
    assert len(found.estimates.measured) == 1
    assert told == [1, 1]


def test_points_that_are_left_are_counted_by_what_ended() -> None:
    found = arranged(layers(), "h100x2")
    found.plan_candidate(Candidate(2))
    count = len(found.queue)
    assert found.result().skipped[NO_MOVES] == count
    found.budget = Budget.of(1e6, None)
    assert found.result().skipped[NO_TIME] == count


def test_points_that_were_left_out_count_where_all_are_refused() -> None:
    found = begun(layers(), "h100x2")
    found.log.plan("refused", replace(QUICK, grid=(3,)))
    found.queue.left_out = 7
    with pytest.raises(UserError, match="refused so: .*; give more time or moves for the 7 that"):
        found.result()


def test_half_of_what_is_left_goes_to_the_body() -> None:
    found = begun(layers(), "h100x2")
    with found.until_half():
        assert found.until == 0.5
        with found.until_half():
            assert found.until == 0.25
    with pytest.raises(ValueError, match="here"), found.until_half():
        raise ValueError("here")
    assert found.until == 1.0


def test_a_budget_ends() -> None:
    """By its moves, by its time, and where it is said to be used up; a plan that is known costs nothing."""
    found = begun(layers(), "h100x2")
    assert found.affords()
    found.budget = Budget.of(1.0, 2)
    found.log.plan("slow", SLOW)
    found.log.plan("again", SLOW)
    assert found.affords()
    found.log.plan("quick", QUICK)
    assert not found.affords()
    found.budget = Budget.of(1e6, None)
    assert found.affords()
    found.end()
    assert not found.affords()


def test_what_goes_on_now_ends_before_the_whole(clock: Clock) -> None:
    found = timed()
    found.until = 0.5
    clock.now = 4.0
    with found.until_half():
        assert found.until == pytest.approx(0.45)
    assert found.affords()
    clock.now = 6.0
    assert not found.affords()
    found.until = 1.0
    assert found.affords()


def test_the_next_plan_takes_as_long_as_the_longest_of_the_last_three(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the best was planned elsewhere it is planned once more at the end, which takes time as well."""
    took = iter((9.0, 2.0, 3.0, 1.0, 1.0))
    monkeypatch.setattr(Evaluator, "took", lambda *_: next(took))
    found = timed()
    for count in (1, 2, 4, 8):
        found.log.plan(f"{count}", replace(QUICK, micro_batches=count))
    clock.now = 6.5
    assert found.affords()
    clock.now = 7.5
    assert not found.affords()
    clock.now = 6.5
    elsewhere(found)
    assert not found.affords()


def test_few_are_planned_in_any_case_and_until_one_fits_others_in_time(clock: Clock) -> None:
    found = timed(limit=1)
    clock.now = 2 * SECONDS
    for micro_batches in range(FAILED):
        assert found.must_plan()
        found.candidates[Candidate(2, micro_batches=1 + micro_batches)] = found.log.plan(
            "quick", QUICK
        )
    assert not found.must_plan()
    assert not found.affords()
    # What the last ones took would be too long, if one fitted.
    found.log._took.append(SECONDS)
    clock.now = SECONDS / 2
    assert found.best is None
    assert found.affords()


def test_a_point_is_planned_in_time_whose_plan_ends_or_is_known(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Estimates, "seconds_of_plan", lambda *_: 3.0)
    found, candidate = timed(), Candidate(2)
    clock.now = 6.5
    assert found.in_time(candidate)
    clock.now = 7.5
    assert not found.in_time(candidate)
    # An earlier search has planned it.
    answer = found.evaluator.of(found.strategy(candidate))
    assert isinstance(answer, Measures)
    assert not found.in_time(candidate)
    learned = Learned(candidates={candidate: answer})
    assert SearchState(found.evaluator, found.lower_bounds, found.budget, learned).in_time(
        candidate
    )


def test_a_best_that_is_planned_once_more_takes_time_from_points(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Estimates, "seconds_of_plan", lambda *_: 3.0)
    monkeypatch.setattr(Evaluator, "took", lambda *_: 2.0)
    found = timed()
    found.log.plan("quick", QUICK)
    elsewhere(found)
    clock.now = 4.5
    assert found.in_time(Candidate(2))
    clock.now = 5.5
    assert not found.in_time(Candidate(2))


def test_before_any_plan_half_of_the_time_is_for_looks(clock: Clock) -> None:
    found = timed()
    found.until = 0.8
    clock.now = 3.5
    assert found.may_probe()
    clock.now = 4.5
    assert not found.may_probe()
    found.log.plan("quick", QUICK)
    assert found.may_probe()
    clock.now = 8.5
    assert not found.may_probe()


def test_who_is_told_is_given_the_state() -> None:
    plain, seen = begun(layers(), "h100x2"), list[SearchState]()
    found = SearchState(plain.evaluator, plain.lower_bounds, plain.budget, told=seen.append)
    found.log.plan("quick", QUICK)
    assert not seen
    found.tell()
    assert seen == [found]
