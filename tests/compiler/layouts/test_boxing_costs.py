"""Tables of what boxing costs between any two layouts of a tensor."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weft.compiler.layouts.boxing_costs import BoxingCosts, _all_shortest
from weft.hardware import CostModel
from weft.layout import SBP, Broadcast, Partial, Split
from weft.ops import TensorSpec

SPEC = TensorSpec((8, 6), "float32")
ENDS: tuple[SBP, ...] = (Broadcast(), Partial("sum"), Split(0), Split(1))
B = Broadcast()


def test_axes_of_one_rank_cost_nothing() -> None:
    """Tables are of the other axes; along one rank everything is there already."""
    alone, among = (BoxingCosts(grid, CostModel()) for grid in ((2,), (1, 2, 1, 1)))
    plain = alone.table(SPEC, 0, ((), ()), (ENDS, ENDS))
    others = (Split(0), B, B)
    assert np.array_equal(among.table(SPEC, 1, (others, (B, B, Split(1))), (ENDS, ENDS)), plain)
    assert among._pairs(SPEC, ("sum",)).ndim == 2
    # Along such an axis the others' boxing is all that it costs, whatever the ends.
    reduced = among.table(SPEC, 0, ((Partial("sum"), B, B), (B, B, B)), (ENDS, ENDS))
    assert np.unique(reduced) == [plain[1, 0]]
    assert plain[1, 0] > 0


def test_reductions_that_neither_end_has_are_no_way_to_go() -> None:
    """Costs are the same with all reductions in the table."""
    costs = BoxingCosts((2, 3), CostModel())
    few, all_three = costs._pairs(SPEC, ("sum",)), costs._pairs(SPEC, ("sum", "max", "min"))
    kept = np.ix_(*[[0, 1, 4, 5]] * 4)
    assert np.array_equal(all_three[kept], few)


@pytest.mark.parametrize("seed", range(3))
def test_shortest_paths(seed: int) -> None:
    """By way of every state, as Floyd and Warshall do."""
    chance = random.Random(seed)
    costs = np.full((20, 20), np.inf)
    np.fill_diagonal(costs, 0.0)
    for state in range(20):
        for _ in range(3):
            costs[state, chance.randrange(20)] = chance.randrange(1, 100)
    np.fill_diagonal(costs, 0.0)
    expected = costs.copy()
    for via in range(20):
        expected = np.minimum(expected, expected[:, via, None] + expected[None, via, :])
    assert np.array_equal(_all_shortest(costs), expected)
