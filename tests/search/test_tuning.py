"""The numbers that steer a search: few, and each with a case that needs it.

Cases of others stand beside what they steer: COMPUTED and ABOUT in `test_estimate`, FAILED in `test_enumeration`,
SLOWER in `test_second_search`, NEAR_STAGED in `moves/test_local_search`.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from search.jobs import arranged, begun, decoder, layers, reserve
from weft.search import tuning
from weft.search.candidate import Candidate
from weft.search.candidate_table import CandidateTable
from weft.search.enumeration import Enumeration
from weft.search.estimate import Estimates, roofline
from weft.search.measures import Measures
from weft.search.moves import local_search
from weft.search.moves.local_search import LocalSearch
from weft.search.moves.neighbours import Neighbours
from weft.search.state import Best
from weft.strategy.strategy import data_parallel
from weft.units import Bytes, Seconds

PIPE = Candidate(1, stages=2, micro_batches=4, schedule="1f1b")
NOTHING = Seconds(0.0), Seconds(0.0)


def seconds(estimates: Estimates, *candidates: Candidate) -> list[float]:
    return list(roofline(CandidateTable.of(candidates), estimates.lower_bounds).seconds)


def test_they_are_few() -> None:
    names = [name for name in vars(tuning) if name.isupper()]
    assert len(names) <= 16


def test_gradients_hide_behind_the_backward() -> None:
    """HIDING: without it the estimate of data parallel on a slow link is farther from what its plan takes."""
    search = begun(layers(), "flexflow-k80x4")
    found, lower_bounds = CandidateTable.of([Candidate(4)]), search.lower_bounds
    busy, reduced = lower_bounds.work.busy(found)[0], lower_bounds.exchanges.reduction(found)[0]
    update = lower_bounds.work.updates_again(found)[0]
    exposed = seconds(search.estimates, Candidate(4))[0] - busy - update
    assert exposed == pytest.approx(max(reduced - tuning.HIDING * busy, 0.0))
    assert exposed < reduced


def test_gradients_of_weights_fill_a_bubble() -> None:
    """FILLED: zero bubble comes before 1F1B, whose other terms are the same."""
    estimates = begun(decoder(8), "h100x2").estimates
    one, zero = seconds(estimates, PIPE, replace(PIPE, schedule="zero_bubble"))
    assert zero < one


def test_layouts_that_deduction_finds_come_behind_data_parallel() -> None:
    """FREE: else all grids of them would come with the best of data parallel."""
    estimates = begun(decoder(8), "h100x4").estimates
    plain, free = seconds(estimates, Candidate(4), Candidate(2, 2, layouts="free"))
    assert free == pytest.approx(tuning.FREE * plain)


def test_samples_that_ranks_do_not_divide_wait() -> None:
    """UNKNOWN: four samples on three ranks would come with those on two."""
    two, three = seconds(begun(decoder(8), "h100x4").estimates, Candidate(2), Candidate(3))
    assert three > 1.5 * two


def test_a_pipeline_has_room_only_with_some_to_spare() -> None:
    """STAGED: of 50 that were planned some took a tenth more; one that is near to a planned one is known better."""
    held = int(begun(decoder(8), "h100x2").estimates.about(PIPE)[1]) - reserve()
    for part, room in ((1.05, False), (1.15, True)):
        found = begun(decoder(8), "h100x2", reserve() + int(part * held)).estimates
        assert found.has_room(PIPE) == room
        found.learn(PIPE, Measures(Seconds(1.0), Bytes(reserve() + held), *NOTHING))
        assert found.has_room(PIPE)


def test_what_is_between_layers_that_are_cut_stays_whole() -> None:
    """BETWEEN: without it a Megatron grid holds by estimate what its plan does not fit in."""
    grid, shards = Candidate(1, 4, layouts="columns"), Candidate(1, 4, layouts="sequence")
    search = begun(decoder(8), "h100x4")
    whole, cut = roofline(CandidateTable.of([grid, shards]), search.lower_bounds).beside
    assert whole / cut == pytest.approx(1 + 3 * tuning.BETWEEN)
    held = search.plan_candidate(grid)
    assert isinstance(held, Measures)
    states = search.lower_bounds.states(CandidateTable.of([grid]))[0]
    assert held.memory - states > (whole + cut) / 2


@pytest.mark.parametrize("blocks", [2, 8])
def test_what_should_be_slower_than_the_best_waits_for_moves(blocks: int) -> None:
    """LIKELY of a step with looks, LIKELY_UNSEEN of one without."""
    search = arranged(decoder(blocks), "h100x2")
    Enumeration(search).plan(True, likely=True)
    times = tuning.LIKELY if blocks == 8 else tuning.LIKELY_UNSEEN
    queue, log = search.queue, search.log
    left = queue.first(queue.candidates.by_hand, 999)
    assert all(order > times * log.quickest for _, order in left)
    assert times > 1


def test_a_chain_keeps_steps_that_are_a_little_longer() -> None:
    """TEMPERATURE: none would be kept without it; a step that takes a tenth more seldom is."""
    search = begun(layers(), "flexflow-k80x2")
    search.log.plan("best", replace(data_parallel(), grid=(2,)))
    best = search.log.best
    assert best is not None
    local, random = LocalSearch(search, Random(0), Neighbours(search)), Random(0)
    drawn = [local._draw(random, best.strategy, best.measures)[2] for _ in range(200)]
    assert min(drawn) >= best.measures.seconds
    assert 20 < sum(each > 1.02 * best.measures.seconds for each in drawn) < 120
    assert sum(each > 1.1 * best.measures.seconds for each in drawn) < 10


def test_a_chain_that_finds_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """PATIENCE: the budget has no end here."""
    monkeypatch.setattr(local_search, "PATIENCE", 3)
    search = begun(layers(), "flexflow-k80x2")
    search.log.plan("best", replace(data_parallel(), grid=(2,)))
    best = search.log.best
    assert best is not None
    LocalSearch(search, Random(0), Neighbours(search))._drawn(best.strategy)
    assert 2 <= len(search.log.course) < 100


@pytest.mark.parametrize(("idle", "first"), [(0.5, True), (0.5e-9, False)])
def test_places_come_first_where_ranks_wait(idle: float, first: bool) -> None:
    """WORTH: with no part of the step all machines would try places before layouts."""
    search = begun(layers(), "flexflow-k80x4")
    strategy = replace(data_parallel(), grid=(4,))
    measures = Measures(Seconds(1.0), Bytes(1), Seconds(0.0), Seconds(idle))
    search.log.best = Best("", strategy, measures)
    worth, others = Neighbours(search)._along(strategy)
    assert bool(worth) == first
    assert others
