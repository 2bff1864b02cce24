"""The log of a search: what counts as planned, which is the best, and what came when."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

import weft
from search.jobs import begun, layers
from weft.errors import UserError
from weft.search.measures import Measures, TooSlow, Unplannable
from weft.search.state import Best, SearchState
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
        found.log.plan(name, strategy)
    return found


def measured(answer: object) -> Measures:
    assert isinstance(answer, Measures)
    return answer


def best_of(found: SearchState) -> Best:
    assert found.log.best is not None
    return found.log.best


def test_before_any_plan_nothing_is_known() -> None:
    log = searched().log
    assert (log.planned, log.best, log.quickest, log.bound) == (0, None, inf, 0.0)


def test_the_quickest_is_the_best_whatever_the_order() -> None:
    for names in (("slow", "quick", "staged"), ("quick", "staged", "slow")):
        found = searched(None, **{name: EVERY[name] for name in names})
        took = {name: measured(found.log.plan(name, EVERY[name])) for name in names}
        assert found.best == ("quick", QUICK, took["quick"])
        assert found.log.quickest == min(each.seconds for each in took.values())


def test_a_strategy_is_planned_once_whatever_its_name() -> None:
    found = searched(quick=QUICK)
    assert found.log.plan("again", QUICK) == found.evaluator.of(QUICK)
    assert found.planned == found.log.planned_anew == 1
    result = found.result()
    assert [each.name for each in result.tried] == ["quick"]
    assert len(result.course) == 1


def test_patterns_in_another_order_are_another_strategy() -> None:
    one = replace(QUICK, parameters={"0.*": weft.broadcast, "*": weft.broadcast})
    other = replace(QUICK, parameters={"*": weft.broadcast, "0.*": weft.broadcast})
    assert one == other
    assert searched(one=one, other=other).planned == 2


def test_what_lacks_room_is_never_the_best() -> None:
    small = replace(SLOW, zero=weft.Zero(3))
    held = [measured(searched().log.plan("", each)).memory for each in (small, QUICK)]
    assert held[0] < held[1]
    found = searched(held[0], quick=QUICK, small=small)
    assert best_of(found).name == "small"
    assert found.log.move("quick", QUICK, found.log.quickest) == found.log.plan("quick", QUICK)
    assert best_of(found).name == "small"
    outcomes = {each.name: each.outcome for each in found.result().tried}
    assert outcomes == {"small": "best", "quick": "does not fit"}


def test_no_result_without_one_that_fits() -> None:
    with pytest.raises(UserError, match="no strategy fits"):
        searched(1000, **EVERY).result()
    with pytest.raises(UserError, match="no strategy that was tried can be planned"):
        searched(refused=REFUSED).result()


def test_nothing_is_below_the_bound() -> None:
    """Before candidates were looked at there is none."""
    found = searched(quick=QUICK)
    assert found.bound == 0.0
    assert "bound: none is known" in str(found.result())
    quickest = found.log.quickest
    found.log.least = Seconds(2 * quickest)
    assert found.bound == quickest
    found.log.least = Seconds(quickest / 4)
    assert found.bound == quickest / 4
    assert found.result().gap == pytest.approx(0.75)


def test_of_moves_those_stand_among_what_was_tried_that_became_the_best() -> None:
    found = searched(slow=SLOW)
    before = found.log.quickest
    assert isinstance(found.log.move("staged", STAGED, Seconds(before / 1e6)), TooSlow)
    assert isinstance(found.log.move("quick", QUICK, before), Measures)
    assert isinstance(found.log.move("refused", REFUSED, before), Unplannable)
    assert isinstance(found.log.move("refused", REFUSED, before), Unplannable)
    assert found.planned == 4
    assert best_of(found).name == "quick"
    result = found.result()
    assert sorted(each.name for each in result.tried) == ["quick", "slow"]
    (why,) = [reason for reason in result.skipped if reason.startswith("refused: ")]
    assert result.skipped[why] == 1


def test_a_start_that_is_refused_counts_as_none() -> None:
    found = searched(quick=QUICK)
    assert isinstance(found.log.plan("start", REFUSED), Unplannable)
    assert found.log.forget_refused(REFUSED).startswith("the grid 3 has 3")
    assert not found.log.forget_refused(QUICK)
    assert found.planned == 1
    assert [each.name for each in found.result().tried] == ["quick"]


def test_the_best_that_is_staged_otherwise_has_stages_or_none() -> None:
    found = searched(slow=SLOW, quick=QUICK)
    assert found.log.best_staged_otherwise(best_of(found)) is None
    measures = measured(found.log.plan("staged", STAGED))
    other = found.log.best_staged_otherwise(best_of(found))
    assert other == Best("staged", STAGED, measures)
    found = searched(staged=STAGED)
    found.log.move("slow", SLOW, Seconds(0.0))
    assert found.log.best_staged_otherwise(best_of(found)) is None


def test_the_course_says_what_came_when() -> None:
    found = searched(slow=SLOW, refused=REFUSED, quick=QUICK)
    course = found.result().course
    slow, quick = (measured(found.log.plan("", each)).seconds for each in (SLOW, QUICK))
    assert [each.seconds for each in course] == [slow, None, quick]
    assert [each.best for each in course] == [slow, slow, quick]
    assert [each.after for each in course] == sorted(each.after for each in course)


def test_each_chain_of_moves_has_a_name_of_its_own_in_the_course() -> None:
    found = searched()
    with found.log.in_chain("descent"):
        found.log.plan("slow", SLOW)
    found.log.plan("staged", STAGED)
    with found.log.in_chain("descent"):
        found.log.plan("quick", QUICK)
    assert [each.chain for each in found.result().course] == ["descent 1", "points", "descent 2"]


def test_what_is_known_of_moves_is_of_the_best() -> None:
    found = searched(staged=STAGED)
    found.log.locality = "none of 3 single moves from the best is quicker"
    found.log.plan("slow", SLOW)
    assert found.log.locality
    found.log.plan("quick", QUICK)
    assert not found.log.locality
    assert "none was tried from the best" in found.result().locality


def test_a_record_holds_all_answers() -> None:
    record = searched(slow=SLOW, quick=QUICK, refused=REFUSED).record()
    assert record.best == QUICK
    assert len(record.learned.answers) == 3
