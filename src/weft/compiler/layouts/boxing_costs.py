"""The costs of boxing between any two layouts of one tensor, as tables over all pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from weft.boxing import COLLECTIVES
from weft.boxing.path import moves, whole_states
from weft.boxing.transfer import crossing
from weft.hardware import CostModel
from weft.layout import REDUCTIONS, SBP, Broadcast, Layout, Partial, Placement, Split
from weft.ops import TensorSpec
from weft.units import ITEM_SIZE, Bytes

Table: TypeAlias = npt.NDArray[np.float64]
SBPs: TypeAlias = tuple[SBP, ...]
# Tables over so few layouts, at most 128 KiB each, are remembered between deductions.
_FEW_LAYOUTS = 128


@final
@dataclass(frozen=True)
class BoxingCosts:
    """Costs of the cheapest chains of steps on a grid, remembered by size of tensor.

    Partial of one reduction costs as Partial of another does, so that all but three of them share
    one number: a change between those of one number, which no rule asks for, seems free.
    """

    grid: tuple[int, ...]
    cost_model: CostModel
    _all_pairs: dict[tuple[int, tuple[int, ...]], Table] = field(default_factory=dict)

    def table(
        self, spec: TensorSpec, axis: int, others: tuple[SBPs, SBPs], ends: tuple[SBPs, SBPs]
    ) -> Table:
        """Costs from each SBP of `ends[0]` to each of `ends[1]` on `axis`, in bytes.

        `others` are the SBPs of the other axes before and after, in the order of the axes.
        """
        numbers = sbp_numbers(len(spec.shape))
        before, after = ([numbers[sbp] for sbp in sbps] for sbps in others)
        index: tuple[int | slice, ...] = (
            *before[:axis],
            slice(None),
            *before[axis:],
            *after[:axis],
            slice(None),
            *after[axis:],
        )
        rows, columns = ([numbers[sbp] for sbp in sbps] for sbps in ends)
        table: Table = self._pairs(spec)[index][np.ix_(rows, columns)]
        return table

    def _pairs(self, spec: TensorSpec) -> Table:
        """Costs between all layouts: one dimension for each axis before, then one for each axis after."""
        size = ITEM_SIZE.get(spec.dtype, 8)
        key = (size, spec.shape)
        if key not in self._all_pairs:
            small = len(_distinct(len(spec.shape))) ** len(self.grid) <= _FEW_LAYOUTS
            found = _remembered if small else _shortest
            self._all_pairs[key] = found(self.grid, self.cost_model, spec.shape, size)
        return self._all_pairs[key]


def _shortest(
    grid: tuple[int, ...], cost_model: CostModel, shape: tuple[int, ...], itemsize: int
) -> Table:
    """All shortest paths over layouts (Floyd and Warshall)."""
    options = _distinct(len(shape))
    states = list(product(options, repeat=len(grid)))
    number = {state: i for i, state in enumerate(states)}
    costs = np.full((len(states), len(states)), np.inf)
    np.fill_diagonal(costs, 0.0)
    for state, row in number.items():
        for kind, _, after, moved in moves(state, grid, shape, itemsize, options):
            costs[row, number[after]] = cost_model.boxing(Bytes(moved), int(kind in COLLECTIVES))
    if len(grid) > 1:
        _add_transfers(costs, number, grid, cost_model, shape, itemsize)
    for via in range(len(states)):
        np.minimum(costs, costs[:, via, None] + costs[None, via, :], out=costs)
    costs += cost_model.bytes_per_held * _grown(states, grid, math.prod(shape) * itemsize)
    costs.setflags(write=False)
    return costs.reshape((len(options),) * (2 * len(grid)))


# A process plans one step several times: for other shapes, for evaluation, without its update.
_remembered = lru_cache(maxsize=512)(_shortest)


def _grown(states: Sequence[SBPs], grid: tuple[int, ...], size: int) -> Table:
    """Bytes that all ranks together hold more after boxing than before."""
    held = np.array([size * _copies(state, grid) for state in states], np.float64)
    grown: Table = np.maximum(held[None, :] - held[:, None], 0.0)
    return grown


def _copies(state: SBPs, grid: tuple[int, ...]) -> int:
    """On how many ranks each element lies."""
    pairs = zip(state, grid, strict=True)
    return math.prod(parts for sbp, parts in pairs if not isinstance(sbp, Split))


def _add_transfers(
    costs: Table,
    number: dict[SBPs, int],
    grid: tuple[int, ...],
    cost_model: CostModel,
    shape: tuple[int, ...],
    itemsize: int,
) -> None:
    """Lower `costs` to those of transfers, which change several axes at once."""
    where = Placement("cpu", grid, tuple(range(math.prod(grid))))
    whole = whole_states(tuple(sbp_numbers(len(shape))), len(grid))
    columns = [number[state] for state in whole]
    for state in whole:
        moved = crossing(Layout(where, state), where, whole, shape)
        prices = [cost_model.boxing(Bytes(each * itemsize), 1) for each in moved]
        row = costs[number[state]]
        row[columns] = np.minimum(row[columns], prices)


def reductions(made: SBPs, wanted: SBPs) -> Table:
    """1 where a Partial is made and something else is wanted, 0 elsewhere."""
    partial, final = ([isinstance(sbp, Partial) for sbp in sbps] for sbps in (made, wanted))
    return np.outer(partial, np.logical_not(final)).astype(float)


def idle_bytes(spec: TensorSpec, axis: int, others: SBPs, grid: tuple[int, ...]) -> Bytes:
    """Bytes that all ranks together hold more when a tensor is Broadcast along `axis` than when it is Split.

    `others` are the SBPs of the other axes, in order. It is what an all-gather along the axis
    moves.
    """
    rest = grid[:axis] + grid[axis + 1 :]
    copies = (parts for sbp, parts in zip(others, rest, strict=True) if not isinstance(sbp, Split))
    size = math.prod(spec.shape) * ITEM_SIZE.get(spec.dtype, 8)
    return Bytes((grid[axis] - 1) * size * math.prod(copies))


_NUMBERS: dict[int, dict[SBP, int]] = {}


def sbp_numbers(dims: int) -> dict[SBP, int]:
    """All SBPs of a tensor of `dims` dimensions, numbered as the tables have them."""
    if dims not in _NUMBERS:
        found = {sbp: number for number, sbp in enumerate(_distinct(dims))}
        rest = dict.fromkeys(map(Partial, REDUCTIONS[3:]), found[Partial(REDUCTIONS[2])])
        _NUMBERS[dims] = found | rest
    return _NUMBERS[dims]


def _distinct(dims: int) -> SBPs:
    """One SBP for each number."""
    return (Broadcast(), *map(Partial, REDUCTIONS[:3]), *map(Split, range(dims)))
