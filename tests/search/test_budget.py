"""Budgets of seconds and of moves, by a clock that tests set."""

from __future__ import annotations

from math import inf, nan

import pytest

from weft.errors import UserError
from weft.search import budget
from weft.search.budget import Budget


def at(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the clock."""
    monkeypatch.setattr(budget, "monotonic", lambda: seconds)


def test_seconds_end_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, 100.0)
    found = Budget.of(10, None)
    assert found == Budget(110.0, inf, 100.0)
    assert found.part() == 0.0
    at(monkeypatch, 104.0)
    assert found.part() == 0.4
    assert found.allows(10**9, 5.9)
    assert not found.allows(0, 6.0)
    at(monkeypatch, 110.0)
    assert not found.allows(0)


def test_moves_end_by_their_number_whatever_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, 100.0)
    found = Budget.of("not asked for", 3)
    at(monkeypatch, 1e12)
    assert found.allows(2, next_seconds=1e12)
    assert not found.allows(3)
    assert found.part() == 0.0


@pytest.mark.parametrize("seconds", [0, -1.0, nan, inf, 10**400, True, "60", None])
def test_seconds_that_are_none_are_told(seconds: object) -> None:
    with pytest.raises(UserError, match=r"seconds must be a number above 0, such as 60, got"):
        Budget.of(seconds, None)


@pytest.mark.parametrize("moves", [0, -1, 2.0, True, "3"])
def test_moves_that_are_none_are_told(moves: object) -> None:
    with pytest.raises(UserError, match=r"moves must be the number of strategies .*, from 1, got"):
        Budget.of(60, moves)
