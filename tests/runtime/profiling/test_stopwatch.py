"""The median of rounds, and how far they lie apart."""

from __future__ import annotations

import pytest

from weft.runtime.profiling.call_times import summary, time_in_turns


def test_the_median_counts_and_quartiles_say_the_spread() -> None:
    found = summary([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.seconds == 3.0
    assert found.spread == pytest.approx(min(0.5, 3.0 / 1.349 / 3.0))
    assert summary([10.0, 10.1, 9.9, 10.0, 10.0]).spread == pytest.approx(0.1 / 1.349 / 10.0)
    assert summary([1.0, 1.0, 9.0, 99.0, 99.0]).spread == 0.5
    assert summary([2.0]) == (2.0, 0.0)


def test_works_are_called_in_turns_and_waited_for() -> None:
    calls: list[str] = []
    works = [lambda: calls.append("a"), lambda: calls.append("b")]
    found, whole = time_in_turns(works, [0, 1, 0], 0.0, lambda: calls.append("."))
    assert len(found) == 2
    assert calls[:12] == ["a", ".", "b", ".", "a", "."] * 2
    assert all(0 < each.seconds < 1 for each in found)
    assert sum(each.seconds for each in found) < whole.seconds < 1
