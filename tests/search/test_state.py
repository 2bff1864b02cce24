"""The state of a search: what counts as planned, which is the best, what is left, and the result."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

import weft
from search.jobs import begun, layers
from weft.errors import UserError
from weft.search.budget import Budget
from weft.search.evaluation.measures import Longer, Measures, Refused
from weft.search.order.frontier import Frontier
from weft.search.space.fixed import space_of
from weft.search.state import NO_MOVES, NO_TIME, SearchState
from weft.strategy.strategy import Strategy
from weft.units import Seconds

QUICK = replace(weft.data_parallel(), grid=(2,))
SLOW = replace(QUICK, micro_batches=8)
STAGED = replace(QUICK, stages=2, micro_batches=2)
# There are two ranks.
REFUSED = replace(QUICK, grid=(3,))
# Each takes other time, as each product starts in each micro-batch.
EVERY = {"slow": SLOW, "quick": QUICK, "staged": STAGED}


def searched(limit: int | None = None, **strategies: Strategy) -> SearchState:
    """A search that planned these."""
    found = begun(layers(), "h100x2", limit)
    for name, strategy in strategies.items():
        found.plan(name, strategy)
    return found


def measured(answer: object) -> Measures:
    assert isinstance(answer, Measures)
    return answer


def test_before_any_plan_nothing_is_known() -> None:
    found = searched()
    assert (found.planned, found.best, found.quickest, found.bound) == (0, None, inf, 0.0)


def test_the_quickest_is_the_best_whatever_the_order() -> None:
    for names in (("slow", "quick", "staged"), ("quick", "staged", "slow")):
        found = searched(None, **{name: EVERY[name] for name in names})
        took = {name: measured(found.plan(name, EVERY[name])) for name in names}
        assert found.best == ("quick", QUICK, took["quick"])
        assert found.quickest == took["quick"].seconds == min(t.seconds for t in took.values())


def test_a_strategy_is_planned_once_whatever_its_name() -> None:
    found = searched(quick=QUICK)
    assert found.plan("again", QUICK) == found.evaluator.of(QUICK)
    assert found.planned == found.planned_anew == 1
    result = found.result()
    assert [each.name for each in result.tried] == ["quick"]
    assert len(result.course) == 1


def test_what_lacks_room_is_never_the_best() -> None:
    small = replace(SLOW, zero=weft.Zero(3))
    held = [measured(searched().plan("", each)).memory for each in (small, QUICK)]
    assert held[0] < held[1]
    found = searched(held[0], quick=QUICK, small=small)
    assert found.best is not None
    assert found.best[0] == "small"
    assert found.move("quick", QUICK, found.quickest) == found.plan("quick", QUICK)
    assert found.best[0] == "small"
    outcomes = {each.name: each.outcome for each in found.result().tried}
    assert outcomes == {"small": "best", "quick": "does not fit"}


def test_no_result_without_one_that_fits() -> None:
    with pytest.raises(UserError, match="no strategy fits"):
        searched(1000, **EVERY).result()
    with pytest.raises(UserError, match="no strategy that was tried can be planned"):
        searched(refused=REFUSED).result()


def test_nothing_is_below_the_bound() -> None:
    """Before points were looked at there is none."""
    found = searched(quick=QUICK)
    assert found.bound == 0.0
    assert "bound: none is known" in str(found.result())
    found.arrange(found.by_hand, Seconds(2 * found.quickest), found.fronts)
    assert found.bound == found.quickest
    least = Seconds(found.quickest / 4)
    found.arrange(found.by_hand, least, found.fronts)
    assert found.bound == least
    assert found.result().gap == pytest.approx(0.75)


def test_of_moves_those_stand_among_what_was_tried_that_became_the_best() -> None:
    found = searched(slow=SLOW)
    before = found.quickest
    assert isinstance(found.move("staged", STAGED, Seconds(before / 1e6)), Longer)
    assert isinstance(found.move("quick", QUICK, before), Measures)
    assert isinstance(found.move("refused", REFUSED, before), Refused)
    assert found.planned == 4
    assert found.best is not None
    assert found.best[0] == "quick"
    result = found.result()
    assert sorted(each.name for each in result.tried) == ["quick", "slow"]
    (why,) = [reason for reason in result.skipped if reason.startswith("refused: ")]
    assert result.skipped[why] == 1


def test_a_start_that_is_refused_counts_as_none() -> None:
    found = searched(quick=QUICK)
    assert isinstance(found.plan("start", REFUSED), Refused)
    found.forget_refused(REFUSED)
    found.forget_refused(QUICK)
    assert found.planned == 1
    assert [each.name for each in found.result().tried] == ["quick"]
    assert [reason for reason in found.skipped if reason.startswith("the start is refused: ")]


def test_the_best_that_is_staged_otherwise_has_stages_or_none() -> None:
    found = searched(slow=SLOW, quick=QUICK)
    assert found.best_staged_otherwise() is None
    measures = found.plan("staged", STAGED)
    assert found.best_staged_otherwise() == ("staged", STAGED, measures)
    found = searched(staged=STAGED)
    found.move("slow", SLOW, Seconds(0.0))
    assert found.best_staged_otherwise() is None


def test_a_best_that_another_process_has_planned_takes_time_at_the_end() -> None:
    search = searched()
    assert search.seconds_at_end(3.0) == 0.0
    search.plan("quick", QUICK)
    assert search.seconds_at_end(3.0) == 0.0
    assert search._best is not None
    search._best = (*search._best[:2], None)
    assert 0.0 < search.seconds_at_end(3.0) < 3.0


def test_points_that_are_left_are_counted_by_what_ended() -> None:
    found = searched(quick=QUICK)
    points = space_of(found.facts, every_rank=False)
    front = Frontier(points, found.floors.least(points), found.estimates)
    found.arrange(found.by_hand, Seconds(0.0), (front, found.fronts[1]))
    assert found.result().skipped == {NO_MOVES: len(points)}
    found.budget = Budget.of(1e6, None)
    assert found.result().skipped == {NO_TIME: len(points)}


def test_the_course_says_what_came_when() -> None:
    found = searched(slow=SLOW, refused=REFUSED, quick=QUICK)
    course = found.result().course
    slow, quick = (measured(found.plan("", each)).seconds for each in (SLOW, QUICK))
    assert [each.seconds for each in course] == [slow, None, quick]
    assert [each.best for each in course] == [slow, slow, quick]
    assert [each.after for each in course] == sorted(each.after for each in course)


def test_who_is_told_is_given_the_state() -> None:
    plain, seen = searched(), list[SearchState]()
    found = SearchState(plain.evaluator, plain.floors, plain.budget, told=seen.append)
    found.plan("quick", QUICK)
    assert not seen
    found.tell()
    assert seen == [found]


def test_a_record_holds_all_answers() -> None:
    found = searched(slow=SLOW, quick=QUICK, refused=REFUSED)
    record = found.record()
    assert record.best == QUICK
    assert len(record.learned.answers) == 3


def test_what_is_known_of_moves_is_of_the_best() -> None:
    found = searched(staged=STAGED)
    found.locality = "none of 3 single moves from the best is quicker"
    found.plan("slow", SLOW)
    assert found.locality
    found.plan("quick", QUICK)
    assert not found.locality
    assert "none was tried from the best" in found.result().locality


def test_each_chain_of_moves_has_a_name_of_its_own_in_the_course() -> None:
    found = searched()
    with found.in_chain("descent"):
        found.plan("slow", SLOW)
    found.plan("staged", STAGED)
    with found.in_chain("descent"):
        found.plan("quick", QUICK)
    assert [each.chain for each in found.result().course] == ["descent 1", "points", "descent 2"]


def test_with_time_or_moves_left_out_a_refused_one_stands_for_itself() -> None:
    found = searched(refused=REFUSED)
    found.fronts[0].left_out = 7
    with pytest.raises(
        UserError, match="is refused so: .*; give more time or moves for the 7 that"
    ):
        found.result()
