"""Candidates planned one after the other: which is next, and which are left for later."""

from __future__ import annotations

import numpy as np
import pytest

import weft
from search.jobs import arranged, begun, decoder, layers, least_memory_of, many_classes, reserve
from weft.search.budget import Budget
from weft.search.candidate import Candidate
from weft.search.candidate_table import CandidateTable, kinds_of
from weft.search.enumeration import SLOWER_BEFORE, Enumeration
from weft.search.estimate import Estimates
from weft.search.evaluator import Evaluator
from weft.search.measures import Measures, Unplannable
from weft.search.record import Learned
from weft.search.state import NO_TIME, NOT_QUICKER, SearchState
from weft.strategy.strategy import Strategy

# Above what the device reserves. All candidates with ZeRO 3 take more than these bytes by small steps, but for those
# with blocks that run again.
LIMIT = 330_000
# With that fixed there are few candidates.
FEW = Strategy(stages=1, zero=weft.Zero(3))


def timed(search: SearchState, seconds: float = 1e6) -> SearchState:
    """The search, with a budget of seconds."""
    search.budget = Budget.of(seconds, None)
    return search


def probed(search: SearchState) -> list[bool]:
    """For each candidate by hand true where it was looked at."""
    return [search.estimates.probed(each) for each in search._by_hand]


def test_one_point_of_each_kind_is_looked_at() -> None:
    """By small steps, so that none is planned; others are not looked at."""
    search = timed(arranged(decoder(8), "h100x2", base=FEW))
    Enumeration(search).probe_kinds()
    assert not search.planned
    found = probed(search)
    assert set(kinds_of(search._by_hand)[found]) == set(kinds_of(search._by_hand))
    assert not all(found)


def test_without_small_steps_one_point_of_each_kind_is_planned() -> None:
    search = timed(arranged(layers(), "h100x2"))
    Enumeration(search).probe_kinds()
    kinds = kinds_of(CandidateTable.of(tuple(search.candidates))).tolist()
    assert sorted(kinds) == sorted(set(kinds_of(search._by_hand).tolist()))


def test_time_for_a_plan_of_the_best_is_not_spent_on_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = timed(arranged(decoder(8), "h100x2", base=FEW))
    monkeypatch.setattr(Estimates, "seconds_of_plan", lambda *_: 1e9)
    Enumeration(search).probe_kinds()
    assert len(search.estimates.looks) == 1


def test_fully_sharded_points_come_first_where_data_parallel_lacks_room() -> None:
    search = timed(arranged(decoder(8), "h100x2", reserve() + LIMIT))
    Enumeration(search).probe_smallest()
    assert not search.planned
    assert search.estimates.looks
    assert all((each.zero, each.data) == (3, 2) for each in search.estimates.looks)
    roomy = timed(arranged(decoder(8), "h100x2"))
    Enumeration(roomy).probe_smallest()
    assert not roomy.estimates.looks


def test_the_first_plan_has_room_where_no_strategy_by_hand_has() -> None:
    search = arranged(decoder(8), "h100x2", reserve() + LIMIT, Strategy(zero=weft.Zero(3)))
    search.budget = Budget.of(1.0, 1)
    Enumeration(search).plan(True, likely=True)
    assert search.best is not None
    assert search.best[2].memory <= reserve() + LIMIT
    assert search.planned == 1


@pytest.mark.parametrize("blocks", [4, 8])
@pytest.mark.parametrize("moves", [1, 3])
def test_few_moves_find_what_fits_alone(blocks: int, moves: int) -> None:
    """Data parallel with all blocks that run again under ZeRO 3, of a step with small steps and without."""
    step, topology = decoder(blocks), "h100x2"
    search = begun(step, topology)
    least = search.evaluator.of(search.strategy(Candidate(2, zero=3, recompute=blocks)))
    plain = search.evaluator.of(search.strategy(Candidate(2, zero=3)))
    assert isinstance(least, Measures)
    assert isinstance(plain, Measures)
    assert least.memory < plain.memory
    found = weft.search(step, topology, moves=moves, memory_limit=least.memory, planners=0)
    assert found.best.recompute


def test_the_first_plan_is_one_that_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the quickest would take longer than there is, the quickest of those that were looked at and would not."""
    search = arranged(decoder(8), "h100x2")
    others = [Candidate(2, zero=3), Candidate(2, micro_batches=2)]
    for candidate in others:
        search.estimates.look(candidate)
    wanted = min(others, key=lambda each: search.estimates.about(each)[0])
    monkeypatch.setattr(SearchState, "in_time", lambda _, candidate: candidate in others)
    monkeypatch.setattr(SearchState, "affords", lambda _: not search.planned)
    Enumeration(search).plan(True, likely=True)
    assert list(search.candidates) == [wanted]


def test_points_are_planned_in_their_order_until_none_is_likely() -> None:
    """Those by hand, or the others; what is not, comes with the rest."""
    search = arranged(decoder(2), "h100x2", base=FEW)
    candidates = Enumeration(search)
    candidates.plan(True, likely=True)
    count = len(search.candidates)
    assert all(CandidateTable.of(tuple(search.candidates)).by_hand)
    candidates.plan(True, likely=False)
    assert len(search.candidates) >= count
    candidates.plan(False, likely=False)
    assert not len(search.queue)
    assert search._skipped[NOT_QUICKER] >= 0
    assert search.best is not None
    took = [each.seconds for each in search.candidates.values() if isinstance(each, Measures)]
    assert search.best[2].seconds == min(took)


def test_as_few_blocks_run_again_as_have_room() -> None:
    search = arranged(decoder(8), "h100x2", reserve() + LIMIT, FEW, every_rank=True)
    Enumeration(search).plan(False, likely=False)
    again = {each.recompute for each in search.candidates}
    assert again - {0, 8}
    assert search.best is not None
    assert search.best[2].memory <= reserve() + LIMIT


def test_a_point_whose_plan_would_end_late_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    search = arranged(decoder(2), "h100x2", base=FEW)
    search.plan_candidate(Candidate(2, zero=3))
    monkeypatch.setattr(SearchState, "in_time", lambda *_: False)
    left = len(search.queue)
    Enumeration(search).plan(True, likely=False)
    Enumeration(search).plan(False, likely=False)
    assert len(search.candidates) == 1
    assert search._skipped[NO_TIME] + search._skipped[NOT_QUICKER] == left


def test_far_slower_points_of_an_earlier_search_are_not_planned() -> None:
    first = arranged(decoder(2), "h100x2", base=FEW)
    slow, quick = Candidate(1), Candidate(2, zero=3)
    known = {each: first.plan_candidate(each) for each in (slow, quick)}
    pinned = Strategy(stages=1, clip_norm=1.0)
    second = arranged(decoder(2), "h100x2", base=pinned)
    learned = Learned(candidates=known)
    search = SearchState(second.evaluator, second.lower_bounds, second.budget, learned)
    search.arrange(second.queue.candidates)
    search.plan_candidate(quick)
    Enumeration(search).plan(True, likely=False)
    if search.learned.was_slower(slow, 1.1 * search.log.quickest):
        assert slow not in search.candidates
        assert search._skipped[SLOWER_BEFORE] >= 1


def test_a_point_for_which_no_look_ends_in_time_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = arranged(decoder(8), "h100x2", base=FEW)
    search.plan_candidate(Candidate(2, zero=3))
    monkeypatch.setattr(SearchState, "probes_in_time", lambda *_: False)
    Enumeration(search).plan(True, likely=False)
    assert search.queue.left_out > 0
    assert not search.estimates.looks


def test_the_next_point_is_planned_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    search, ahead = arranged(layers(), "h100x2"), list[str]()
    monkeypatch.setattr(Evaluator, "ahead", lambda _, strategy, *__: ahead.append(str(strategy)))
    search.budget = Budget.of(1.0, 2)
    Enumeration(search).plan(True, likely=False)
    first, _ = search.candidates
    assert ahead
    assert str(search.strategy(first)) not in ahead


def test_others_are_better_that_were_looked_at_and_should_be_quicker() -> None:
    search = arranged(decoder(8), "h100x2")
    search.plan_candidate(Candidate(1, micro_batches=4))
    candidates = Enumeration(search)
    assert not candidates.others_are_better()
    other = Candidate(2, recompute=8)
    assert not CandidateTable.of([other]).by_hand[0]
    search.estimates.look(other)
    quicker = search.estimates.about(other)[0] < search.log.quickest
    assert candidates.others_are_better() == quicker
    crowded = Enumeration(arranged(decoder(8), "h100x2", reserve() + LIMIT))
    assert crowded.is_crowded
    assert crowded.others_are_better()


def test_the_cheapest_layouts_are_of_data_parallel_and_told_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search, told = arranged(layers(), "h100x2"), list[int]()
    monkeypatch.setattr(search, "_told", lambda state: told.append(state.planned))
    Enumeration(search).plan_cheapest()
    assert list(search.candidates) == [Candidate(2)]
    tried = {each.name: each for each in search.result().tried}
    assert any("cheapest layouts" in each for each in tried)
    # The layer behind the loss has a row for each class.
    rows = tried["data 2; vocabularies split"]
    assert rows.by_hand
    assert rows.strategy.parameters["2.weight"] == weft.split(0)
    assert "0.weight" not in rows.strategy.parameters
    assert len(told) == 3


def test_the_cheapest_are_tried_when_kinds_were_looked_at() -> None:
    """As a search of some seconds does: data parallel may be planned by then."""
    found = arranged(many_classes(), "flexflow-p100x4")
    Enumeration(found).probe_kinds()
    Enumeration(found).plan_cheapest()
    assert found.best is not None
    name, strategy, _ = found.best
    assert name == "data 4; cheapest layouts"
    assert not strategy.signatures


@pytest.mark.parametrize("divided", [True, False])
def test_vocabularies_are_split_where_ranks_divide_them(divided: bool) -> None:
    search = arranged(layers(), "h100x2" if divided else "h100x4")
    Enumeration(search).plan_cheapest()
    names = [each.name for each in search.result().tried]
    assert any("cheapest layouts" in each for each in names)
    assert any("vocabularies split" in each for each in names) == divided


@pytest.mark.parametrize(
    "why", ["", "no time", "no look", "known before", "too few samples", "fixed"]
)
def test_the_cheapest_are_left_out(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """If plans take long, or are fixed otherwise, none can be looked at, or an earlier search went on from them."""
    base = FEW if why == "fixed" else Strategy()
    search = timed(arranged(decoder(8), "h100x2", base=base), seconds=1000.0)
    monkeypatch.setattr(Estimates, "seconds_of_plan", lambda *_: 900.0 if why == "no time" else 0.0)
    if why == "no look":
        monkeypatch.setattr(SearchState, "may_probe", lambda _: False)
    elif why == "known before":
        # With something else fixed: the strategy of the candidate is none that was planned.
        search.learned = Learned(candidates={Candidate(2): Unplannable("fixed otherwise")})
    elif why == "too few samples":
        monkeypatch.setitem(vars(search.facts), "samples", 1)
    Enumeration(search).plan_cheapest()
    assert bool(search.candidates) == (not why)


@pytest.mark.parametrize("more", [-1, 0])
def test_of_what_surely_lacks_room_no_layouts_are_planned(
    monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    """By its lower bound, before small steps are planned."""
    limit = int(least_memory_of(begun(decoder(8), "h100x2").lower_bounds, Candidate(2))) + more
    search, looked = timed(arranged(decoder(8), "h100x2", limit)), list[Candidate]()
    monkeypatch.setattr(Estimates, "look", lambda _, candidate: looked.append(candidate))
    Enumeration(search).plan_cheapest()
    assert looked == ([] if more else [Candidate(2)])
    assert not search.candidates


def test_after_some_that_lack_room_the_smallest_is_next() -> None:
    """Of a step without small ones, where nothing fits so far."""
    search = arranged(decoder(4), "h100x2", reserve() + 1000)
    search.arrange(
        CandidateTable.of(
            [
                Candidate(2),
                Candidate(2, zero=1),
                Candidate(1),
                Candidate(2, zero=3),
                Candidate(1, 2),
            ]
        )
    )
    search.queue = type(search.queue)(
        CandidateTable.of(
            [
                Candidate(2),
                Candidate(2, zero=1),
                Candidate(1),
                Candidate(2, zero=2),
                Candidate(2, zero=3),
            ]
        ),
        np.zeros(5),
        search.estimates,
    )
    for each in (Candidate(2), Candidate(2, zero=1), Candidate(1)):
        search.plan_candidate(each)
    search.budget = Budget.of(1.0, 4)
    Enumeration(search).plan(True, likely=True)
    assert list(search.candidates)[3] == Candidate(2, zero=3)
