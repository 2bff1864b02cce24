"""The queue of candidates: which comes out, and which have room."""

from __future__ import annotations

import numpy as np
import pytest

from search.jobs import arranged, begun, decoder, layers, reserve
from weft.search.candidate import Candidate
from weft.search.candidate_table import CandidateTable
from weft.search.measures import Measures, Unplannable
from weft.search.queue import CandidateQueue
from weft.search.record import Probe
from weft.units import Bytes, Seconds

FLAT = [Candidate(2), Candidate(2, micro_batches=2), Candidate(2, micro_batches=4), Candidate(1)]


def queue(candidates: list[Candidate], limit: int | None = None) -> CandidateQueue:
    search = begun(decoder(8), "h100x2", limit)
    return CandidateQueue(
        CandidateTable.of(candidates), np.arange(1.0, 1 + len(candidates)), search.estimates
    )


def every(found: CandidateQueue, count: int = 99) -> list[Candidate]:
    return [
        candidate for candidate, _ in found.first(np.ones(len(found.candidates), np.bool_), count)
    ]


def test_the_quickest_by_estimate_is_the_first() -> None:
    found = queue(FLAT)
    took = [found._estimates.about(each)[0] for each in FLAT]
    order = [FLAT[number] for number in np.argsort(took, kind="stable")]
    assert every(found) == order
    assert every(found, 2) == order[:2]
    found.take(order[0])
    found.take(Candidate(64))
    assert every(found, 1) == order[1:2]
    assert len(found) == 3
    found.leave_out(order[1])
    assert (len(found), found.left_out) == (2, 1)


def test_measures_change_the_order() -> None:
    found = queue(FLAT)
    first, *_ = every(found)
    found._estimates.learn(first, Measures(Seconds(9e9), Bytes(1), Seconds(0.0), Seconds(0.0)))
    others = [each for each in FLAT if each != first]
    for each in others:
        found._estimates.learn(each, Measures(Seconds(1.0), Bytes(1), Seconds(0.0), Seconds(0.0)))
    assert every(found)[-1] == first


def test_what_no_plan_makes_quicker_is_dropped() -> None:
    found = queue(FLAT)
    assert found.drop(Seconds(3.0)) == 2
    assert set(every(found)) == set(FLAT[:2])
    assert found.drop(Seconds(3.0)) == 0


def test_what_is_refused_without_stages_comes_last_in_stages_too() -> None:
    pipe = (
        Candidate(2, stages=1, micro_batches=2),
        Candidate(1, stages=2, micro_batches=2, schedule="1f1b"),
    )
    found = queue([*pipe, Candidate(1)])
    found._estimates.looks[Candidate(1, micro_batches=2)] = Probe(Unplannable("no"), 0.0)
    ones = np.ones(3, np.bool_)
    assert every(found)[-1] == pipe[1]
    assert found.first(ones, 3)[-1][1] == np.inf
    for candidate in (pipe[0], Candidate(1)):
        found.take(candidate)
    assert every(found, 1) == [pipe[1]]
    assert not list(found.with_room(ones, looked=False))


def test_those_with_room_come_in_their_order() -> None:
    search = arranged(decoder(8), "h100x2", reserve() + 330_000)
    found, ones = search.queue, np.ones(len(search.queue.candidates), np.bool_)
    assert not list(found.with_room(ones, looked=True))
    roomy = list(found.with_room(ones, looked=False))
    assert [seconds for _, seconds in roomy] == sorted(seconds for _, seconds in roomy)
    assert all(search.estimates.has_room(candidate) for candidate, _ in roomy[:20])
    again = Candidate(2, zero=3, recompute=8)
    search.estimates.look(again)
    assert again in [candidate for candidate, _ in found.with_room(ones, looked=True)]


def test_the_smallest_is_the_one_of_least_memory() -> None:
    found = queue([Candidate(2), Candidate(2, zero=3), Candidate(2, zero=1)], 1)
    among = np.array([True, True, True])
    assert found.smallest(among) == Candidate(2, zero=3)
    assert found.smallest(np.array([True, False, True])) == Candidate(2, zero=1)
    assert found.smallest(~among) is None


def test_a_point_with_all_blocks_again_stands_for_fewer_until_they_were_offered() -> None:
    free = begun(decoder(8), "h100x2", reserve() + 1)
    none, again = Candidate(2, zero=3), Candidate(2, zero=3, recompute=8)
    held = [free.estimates.about(each)[1] for each in (none, again)]
    search = begun(decoder(8), "h100x2", sum(held) // 2)
    found = CandidateQueue(CandidateTable.of([again]), np.zeros(1), search.estimates)
    ((_, before),) = found.first(np.ones(1, np.bool_))
    found.as_it_stands(again)
    ((_, after),) = found.first(np.ones(1, np.bool_))
    assert before < after == pytest.approx(search.estimates.about(again)[0])


def test_an_empty_queue_has_nothing() -> None:
    found = begun(layers(), "h100x2").queue
    none = np.zeros(0, np.bool_)
    assert (len(found), list(found.first(none)), found.drop(Seconds(0.0))) == (0, [], 0)
