"""Coordinates of candidates: numbers in columns and back, and what each may be."""

from __future__ import annotations

from dataclasses import astuple, fields

import pytest

from weft.search.candidate import (
    COLUMNS,
    DEFAULTS,
    LAYOUTS,
    Candidate,
    may_be,
    point_of,
    row_of,
)
from weft.search.candidate_table import CandidateTable, layouts_code, schedule_code

OTHER = Candidate(3, 2, 4, "sequence", 8, "interleaved", 3, 5, True, 2, 6, True)


def test_each_field_of_a_point_is_one_in_its_order() -> None:
    names = [each.name for each in fields(Candidate)]
    assert list(COLUMNS) == names
    assert list(COLUMNS.values()) == list(range(len(names)))


@pytest.mark.parametrize("candidate", [Candidate(4), OTHER])
def test_points_are_read_back_from_numbers_with_their_types(candidate: Candidate) -> None:
    row = row_of(candidate)
    assert all(type(each) is int for each in row)
    found = point_of(list(row))
    assert found == candidate
    assert [type(each) for each in astuple(found)] == [type(each) for each in astuple(candidate)]
    assert row[COLUMNS["layouts"]] == layouts_code(candidate.layouts)
    assert row[COLUMNS["schedule"]] == schedule_code(candidate.schedule)
    assert all(may_be(name, value) for name, value in zip(COLUMNS, astuple(candidate), strict=True))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("data", (0, -1, True, 1.0, "1")),
        ("recompute", (-1, False, None)),
        ("layouts", ("rows", 0, "")),
        ("schedule", ("1F1B", None, 0)),
        ("zero", (4, -1, True, 1.0)),
        ("outer", (0, 1, "")),
    ],
)
def test_what_it_cannot_be_is_told_by_its_type_too(name: str, wrong: tuple[object, ...]) -> None:
    assert not any(may_be(name, each) for each in wrong)


def test_what_is_not_said_is_as_in_a_plain_point() -> None:
    assert DEFAULTS.keys() == COLUMNS.keys() - {"data"}
    assert tuple(CandidateTable.made(2, data=4)) == (Candidate(4), Candidate(4))
    (found,) = CandidateTable.made(1, data=2, layouts=layouts_code(LAYOUTS[3]), outer=1, zero=2)
    assert found == Candidate(2, layouts=LAYOUTS[3], outer=True, zero=2)
