"""The table "why not": of each kind of strategy by hand the best that is known, and how well it is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.search.candidate import Candidate
from weft.search.candidate_table import CandidateTable
from weft.search.measures import Measures, Unplannable
from weft.search.why_not import Sources, why_not
from weft.units import Bytes, Seconds

BEST = Measures(Seconds(1.0), Bytes(100), Seconds(0.1), Seconds(0.0))


def measures(seconds: float, memory: int = 100, exposed: float = 0.1) -> Measures:
    return Measures(Seconds(seconds), Bytes(memory), Seconds(exposed), Seconds(0.0))


def sources(
    simulated: dict[Candidate, Measures | Unplannable], estimated: dict[Candidate, Measures]
) -> Sources:
    return Sources(
        simulated,
        [replace(candidate, stages=1, schedule="", turns=1) for candidate in estimated],
        estimated.get,
        lambda candidates: np.where(candidates.zero == 1, 2.0, 0.5),
        lambda candidates: np.where(candidates.zero == 3, 500, 50),
        limit=200,
    )


def test_each_kind_has_the_best_that_is_known() -> None:
    plain, two, grid = Candidate(4), Candidate(2), Candidate(2, 2, layouts="columns")
    pipe = Candidate(2, stages=2, micro_batches=4, schedule="1f1b")
    shards = [Candidate(4, zero=level) for level in (1, 2, 3)]
    known = sources(
        {plain: measures(3.0, exposed=2.1), two: measures(2.0), grid: measures(0.5, memory=300)},
        {pipe: measures(1.5, exposed=0.6)},
    )
    found = why_not(CandidateTable.of([plain, two, grid, pipe, *shards]), BEST, known)
    assert [(each.kind, each.name, each.known, each.why) for each in found] == [
        ("data parallel", "data 2", "simulated", "1000.000 ms more computing"),
        ("ZeRO 1", "data 4, ZeRO 1", "at least", "no quicker, whatever its plan"),
        ("ZeRO 2", "data 4, ZeRO 2", "at least", "not reached"),
        ("ZeRO 3", "data 4, ZeRO 3", "at least", "0.00 GB too much"),
        ("Megatron grid", "data 2, tensor 2", "simulated", "0.00 GB too much"),
        ("1F1B", str(pipe), "estimated", "500.000 ms more exchanges that nothing hides"),
    ]


def test_what_cannot_be_planned_is_known_by_its_floor() -> None:
    candidate = Candidate(4, zero=2)
    (found,) = why_not(
        CandidateTable.of([candidate]), BEST, sources({candidate: Unplannable("no rule")}, {})
    )
    assert (found.known, found.seconds) == ("at least", 0.5)


def test_the_quickest_that_may_have_room_stands_for_what_is_not_known() -> None:
    """Of three that were not looked at: one without room, and one that takes longer, do not say it."""
    candidates = [Candidate(4, zero=3), Candidate(8, zero=1), Candidate(16)]
    known = sources({}, {})
    assert [each.name for each in why_not(CandidateTable.of(candidates), BEST, known)] == [
        "data 16",
        "data 8, ZeRO 1",
        "data 4, ZeRO 3",
    ]
    two = CandidateTable.of(
        [Candidate(8, 2, layouts="columns", zero=1), Candidate(4, 4, layouts="columns")]
    )
    assert [each.name for each in why_not(two, BEST, known)] == ["data 4, tensor 4"]
