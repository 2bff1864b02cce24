"""The costs of boxing between any two layouts of one tensor, as tables over all pairs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import product
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from weft.boxing import COLLECTIVES
from weft.boxing.path import moves, whole_states
from weft.boxing.transfer import crossing
from weft.cached import cached_property
from weft.hardware import CostModel
from weft.layout import REDUCTIONS, SBP, Broadcast, Layout, Partial, Placement, Reduction, Split
from weft.ops import TensorSpec
from weft.units import ITEM_SIZE, Bytes

Table: TypeAlias = npt.NDArray[np.float64]
SBPs: TypeAlias = tuple[SBP, ...]
Reductions: TypeAlias = tuple[Reduction, ...]

# Reductions that have numbers of their own; all others share the last.
_TOLD_APART = 3
# Tables over so few layouts, at most 128 KiB each, are remembered between deductions.
_FEW_LAYOUTS = 128


@final
@dataclass(frozen=True)
class BoxingCosts:
    """Costs of the cheapest chains of steps on a grid, remembered by size of tensor.

    Partial of one reduction costs as Partial of another does, so that all but three of them share
    one number: a change between those of one number, which no rule asks for, seems free. Reductions
    that neither end has are no way to go. Axes of one rank cost nothing: tables are of the others.
    """

    grid: tuple[int, ...]
    cost_model: CostModel
    _all_pairs: dict[tuple[int, tuple[int, ...], Reductions], Table] = field(default_factory=dict)

    @cached_property
    def _several(self) -> tuple[int, ...]:
        """The axes of several ranks."""
        return tuple(axis for axis, parts in enumerate(self.grid) if parts > 1)

    @cached_property
    def _small(self) -> tuple[int, ...]:
        """The grid of these."""
        return tuple(self.grid[axis] for axis in self._several)

    def table(
        self, spec: TensorSpec, axis: int, others: tuple[SBPs, SBPs], ends: tuple[SBPs, SBPs]
    ) -> Table:
        """Costs from each SBP of `ends[0]` to each of `ends[1]` on `axis`, in bytes.

        `others` are the SBPs of the other axes before and after, in the order of the axes.
        """
        present = _reductions((*others[0], *others[1], *ends[0], *ends[1]))
        numbers = sbp_numbers(len(spec.shape), present)
        before, after = (self._index(axis, sbps, numbers) for sbps in others)
        rows, columns = ([numbers[sbp] for sbp in sbps] for sbps in ends)
        found = self._pairs(spec, present)[before + after]
        table: Table = (
            found[np.ix_(rows, columns)]
            if axis in self._several
            else np.full((len(rows), len(columns)), found)
        )
        return table

    def joint_table(self, spec: TensorSpec, made: Sequence[SBPs], wanted: Sequence[SBPs]) -> Table:
        """Costs from each of some layouts to each of others, which have an SBP for each axis, in bytes."""
        present = _reductions(sbp for sbps in (*made, *wanted) for sbp in sbps)
        numbers = sbp_numbers(len(spec.shape), present)
        found = self._pairs(spec, present)
        sizes = found.shape[: len(self._several)]

        def places(layouts: Sequence[SBPs]) -> list[int]:
            every = ([numbers[sbps[axis]] for axis in self._several] for sbps in layouts)
            return [int(np.ravel_multi_index(at, sizes)) if at else 0 for at in every]

        flat = found.reshape(math.prod(sizes), -1)
        table: Table = flat[np.ix_(places(made), places(wanted))]
        return table

    def _index(
        self, axis: int, others: SBPs, numbers: Mapping[SBP, int]
    ) -> tuple[int | slice, ...]:
        """The place in a table, on one side: all of `axis`, what stands on the others."""
        at = [numbers[sbp] for sbp in others]
        every: list[int | slice] = [*at[:axis], slice(None), *at[axis:]]
        return tuple(every[one] for one in self._several)

    def _pairs(self, spec: TensorSpec, present: Reductions) -> Table:
        """Costs between all layouts: one dimension for each axis before, then one for each axis after."""
        size = ITEM_SIZE.get(spec.dtype, 8)
        key = (size, spec.shape, present)
        if key not in self._all_pairs:
            layouts = len(_distinct(len(spec.shape), present)) ** len(self._small)
            found = _remembered if layouts <= _FEW_LAYOUTS else _shortest
            self._all_pairs[key] = found(self._small, self.cost_model, spec.shape, size, present)
        return self._all_pairs[key]


def _shortest(
    grid: tuple[int, ...],
    cost_model: CostModel,
    shape: tuple[int, ...],
    itemsize: int,
    present: Reductions,
) -> Table:
    """All shortest paths over layouts."""
    options = _distinct(len(shape), present)
    states = list(product(options, repeat=len(grid)))
    number = {state: i for i, state in enumerate(states)}
    costs = np.full((len(states), len(states)), np.inf)
    np.fill_diagonal(costs, 0.0)
    for state, row in number.items():
        for kind, _, after, moved in moves(state, grid, shape, itemsize, options):
            costs[row, number[after]] = cost_model.boxing(Bytes(moved), int(kind in COLLECTIVES))
    if len(grid) > 1:
        _add_transfers(costs, number, grid, cost_model, shape, itemsize)
    costs = _all_shortest(costs)
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


def _all_shortest(costs: Table) -> Table:
    """The costs of all shortest paths, from those of single steps (Bellman and Ford, all ends at once).

    From a state few steps lead on, and few steps lead anywhere: less work than by way of every state.
    """
    steps = [np.flatnonzero(np.isfinite(row)) for row in costs]
    prices = [row[after, None] for row, after in zip(costs, steps, strict=True)]
    found = costs
    while True:
        before = found.copy()
        for state, (after, price) in enumerate(zip(steps, prices, strict=True)):
            np.min(price + found[after], axis=0, out=found[state])
        if np.array_equal(before, found):
            return found


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


@cache
def sbp_numbers(dims: int, present: Reductions = REDUCTIONS) -> Mapping[SBP, int]:
    """The SBPs of a tensor of `dims` dimensions, numbered as the tables have them; Partials of some reductions."""
    found = {sbp: number for number, sbp in enumerate(_distinct(dims, present))}
    last = REDUCTIONS[_TOLD_APART - 1]
    others = REDUCTIONS[_TOLD_APART:] if last in present else ()
    return found | dict.fromkeys(map(Partial, others), found[Partial(last)] if others else 0)


def _distinct(dims: int, present: Reductions) -> SBPs:
    """One SBP for each number."""
    partials = (Partial(each) for each in REDUCTIONS[:_TOLD_APART] if each in present)
    return (Broadcast(), *partials, *map(Split, range(dims)))


def _reductions(sbps: Iterable[SBP]) -> Reductions:
    """Those of Partials, and sums, which a chain may pass; others than the first ones as the last of these."""
    found = {sbp.reduction for sbp in sbps if isinstance(sbp, Partial)} | {REDUCTIONS[0]}
    if not found.isdisjoint(REDUCTIONS[_TOLD_APART:]):
        found.add(REDUCTIONS[_TOLD_APART - 1])
    return tuple(each for each in REDUCTIONS[:_TOLD_APART] if each in found)
