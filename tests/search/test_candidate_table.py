"""Candidates by column say what each of them says by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.search.candidate import Candidate
from weft.search.candidate_table import CandidateTable

EVERY = (
    Candidate(4),
    Candidate(2, 2, layouts="columns", zero=1),
    Candidate(2, 2, layouts="free"),
    Candidate(1, 2, 2, "sequence", 4, "1f1b", outer=True),
    Candidate(2, stages=2, micro_batches=4, schedule="interleaved", turns=2),
    Candidate(4, recompute=3, experts=True),
    Candidate(4, offload=3),
)


def test_they_are_read_back_as_they_were() -> None:
    found = CandidateTable.of(EVERY)
    assert tuple(found) == EVERY
    assert len(found) == len(EVERY)
    assert [type(each.outer) for each in found] == [bool] * len(EVERY)
    assert list(CandidateTable.of([EVERY[3]])) == [EVERY[3]]
    assert (len(CandidateTable.of(())), list(CandidateTable.of(()))) == (0, [])


def test_columns_are_the_coordinates() -> None:
    found = CandidateTable.of(EVERY)
    for name in (
        *("data", "tensor", "stages", "micro_batches", "zero", "recompute"),
        *("outer", "turns", "offload", "experts", "ranks"),
    ):
        assert getattr(found, name).tolist() == [getattr(each, name) for each in EVERY]
    assert found.axes.tolist() == [len(each.grid) for each in EVERY]
    assert found.laid("free").tolist() == [each.layouts == "free" for each in EVERY]
    named = found.scheduled("1f1b", "interleaved")
    assert named.tolist() == [each.schedule != "" for each in EVERY]


def test_a_grid_has_one_number() -> None:
    grids = CandidateTable.of(EVERY).grids.tolist()
    same = {(each.data, each.tensor, each.stages) for each in EVERY}
    assert len(set(grids)) == len(same)
    assert grids[0] == grids[5] == grids[6]
    assert grids[1] == grids[2] != grids[3]


def test_each_is_found_by_its_coordinates() -> None:
    found = CandidateTable.of(EVERY)
    assert [found.number(each) for each in EVERY] == list(range(len(EVERY)))
    other = replace(EVERY[0], zero=1)
    assert found.number(other) is None
    assert tuple(found.without([EVERY[0], EVERY[6], other])) == EVERY[1:6]


def test_a_flat_point_stands_for_its_pipelines() -> None:
    flat = Candidate(2, micro_batches=4)
    every = CandidateTable.of(
        [flat, EVERY[4], replace(EVERY[4], zero=1), replace(EVERY[4], data=1)]
    )
    assert every.flat_as(flat).tolist() == [True, True, False, False]


def test_some_are_made_others() -> None:
    found = CandidateTable.of(EVERY)
    assert tuple(found.with_all_kept()) == tuple(
        replace(each, recompute=0, offload=0) for each in EVERY
    )
    assert tuple(found.data_parallel()) == tuple(
        replace(
            each,
            data=each.data * each.tensor,
            tensor=1,
            layouts="data",
            outer=False,
            experts=False,
        )
        for each in EVERY
    )
    laid = tuple(found.laid_as("free", "data"))
    assert laid == (*EVERY[:2], replace(EVERY[2], layouts="data"), *EVERY[3:])
    assert tuple(found) == EVERY


@pytest.mark.parametrize(
    ("candidate", "by_hand"),
    [
        (Candidate(4), True),
        (Candidate(4, zero=3, micro_batches=8), True),
        (Candidate(2, 2, layouts="columns", zero=1), True),
        (Candidate(2, 2, layouts="columns", zero=2), False),
        (Candidate(2, 2, layouts="columns", outer=True), False),
        (Candidate(4, layouts="free"), False),
        (Candidate(4, recompute=3), False),
        (Candidate(4, offload=3), False),
        (Candidate(4, experts=True), False),
        (Candidate(1, stages=4, micro_batches=8, schedule="1f1b"), True),
        (Candidate(1, stages=4, micro_batches=16, schedule="gpipe"), True),
        (Candidate(1, stages=4, micro_batches=4, schedule="1f1b"), False),
        (Candidate(1, stages=4, micro_batches=32, schedule="1f1b"), False),
        (Candidate(1, stages=3, micro_batches=8, schedule="1f1b"), False),
        (Candidate(1, stages=4, micro_batches=8), False),
        (Candidate(2, stages=4, micro_batches=8, schedule="1f1b", zero=1), False),
        (Candidate(1, stages=4, micro_batches=8, schedule="interleaved", turns=2), True),
        (Candidate(1, stages=4, micro_batches=8, schedule="interleaved", turns=4), False),
    ],
    ids=str,
)
def test_some_are_written_by_hand(candidate: Candidate, by_hand: bool) -> None:
    assert CandidateTable.of([candidate]).by_hand.tolist() == [by_hand]
