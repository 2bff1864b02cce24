"""Tables of what boxing costs between any two layouts of a tensor."""

from __future__ import annotations

import math
import random
from itertools import product

import numpy as np
import pytest

from weft.boxing import EXCHANGE_BYTES, steps
from weft.boxing.path import move_weight
from weft.compiler.layouts.boxing_costs import BoxingCosts, Steps
from weft.hardware import CostModel
from weft.layout import SBP, Broadcast, Layout, Partial, Placement, Split
from weft.ops import TensorSpec

SPEC = TensorSpec((8, 6), "float32")
ENDS: tuple[SBP, ...] = (Broadcast(), Partial("sum"), Split(0), Split(1))
B = Broadcast()


def test_axes_of_one_rank_cost_nothing() -> None:
    """Tables are of the other axes; along one rank everything is there already."""
    alone, among = (BoxingCosts(grid, CostModel()) for grid in ((2,), (1, 2, 1, 1)))
    ends = [(each,) for each in ENDS]
    plain = alone.table(SPEC, ends, ends)
    before = [(Split(0), each, B, B) for each in ENDS]
    after = [(B, each, B, Split(1)) for each in ENDS]
    assert np.array_equal(among.table(SPEC, before, after), plain)
    # Along such an axis the others' boxing is all that it costs, whatever the ends.
    sums, whole = ([(each, sbp, B, B) for each in ENDS] for sbp in (Partial("sum"), B))
    reduced = among.table(SPEC, sums, whole)
    assert np.unique(reduced) == [plain[1, 0]]
    assert plain[1, 0] > 0


def test_reductions_that_neither_end_has_are_no_way_to_go() -> None:
    """Costs are the same where all reductions are among the layouts."""
    costs, spec = BoxingCosts((2, 3), CostModel()), SPEC
    layouts = list(product(ENDS, repeat=2))
    few = costs.table(spec, layouts, layouts)
    others = [(Partial("max"), Partial("min")), *layouts]
    assert np.array_equal(costs.table(spec, others, others)[1:, 1:], few)


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
    before, after = np.nonzero(np.isfinite(costs))
    found = Steps.of(before, after, costs[before, after], 20).costs(range(20))
    assert np.array_equal(found.T, expected)


@pytest.mark.parametrize(("grid", "shape"), [((2, 3), (8, 6)), ((2, 2, 3), (7, 5)), ((4,), (6,))])
def test_costs_are_those_of_the_chains_that_run(
    grid: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """From some layouts to all, of even and uneven pieces, as the search for one chain finds it."""
    free = CostModel(bytes_per_held=0.0, bytes_per_collective=float(EXCHANGE_BYTES))
    where = Placement("cpu", grid, tuple(range(math.prod(grid))))
    ends = (Broadcast(), Partial("sum"), *map(Split, range(len(shape))))
    layouts = list(product(ends, repeat=len(grid)))
    table = BoxingCosts(grid, free).table(TensorSpec(shape, "float32"), layouts, layouts)
    for row, made in list(zip(table, layouts, strict=True))[::13]:
        for cost, wanted in zip(row, layouts, strict=True):
            chain = steps(Layout(where, made), Layout(where, wanted), shape, 4)
            assert cost == sum(move_weight(step.kind, step.bytes) for step in chain)
