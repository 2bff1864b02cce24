"""The number of stages of a strategy, however it says them."""

from __future__ import annotations

import pytest

import weft
from weft.strategy.strategy import Strategy, stage_count

ONE, TWO = (weft.Stage([name], weft.placement("cpu", [rank])) for rank, name in enumerate("ab"))


@pytest.mark.parametrize(
    ("stages", "count"), [((), 1), (1, 1), (3, 3), ((ONE,), 1), ((ONE, TWO), 2)]
)
def test_a_number_or_each_of_them(stages: int | tuple[weft.Stage, ...], count: int) -> None:
    assert stage_count(Strategy(stages=stages)) == count
