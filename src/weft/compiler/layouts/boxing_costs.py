"""The costs of boxing between any two layouts of one tensor, as tables over all pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, reduce
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from weft.boxing.overlaps import Indices, overlaps
from weft.boxing.path import GridMoves, copies, grid_moves
from weft.cached import cached_property
from weft.hardware import CostModel
from weft.layout import REDUCTIONS, SBP, Broadcast, Partial, Reduction, Split
from weft.ops import TensorSpec
from weft.units import ITEM_SIZE, Bytes

Table: TypeAlias = npt.NDArray[np.float64]


SBPs: TypeAlias = tuple[SBP, ...]
Reductions: TypeAlias = tuple[Reduction, ...]

# Reductions that have numbers of their own; all others share the last.
_TOLD_APART = 3
# Costs between so few layouts, at most 128 KiB each, are remembered between deductions.
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
    _chains: dict[tuple[int, tuple[int, ...], Reductions], Chains] = field(default_factory=dict)

    @cached_property
    def _several(self) -> tuple[int, ...]:
        return tuple(axis for axis, parts in enumerate(self.grid) if parts > 1)

    @cached_property
    def _small(self) -> tuple[int, ...]:
        return tuple(self.grid[axis] for axis in self._several)

    def table(self, spec: TensorSpec, made: Sequence[SBPs], wanted: Sequence[SBPs]) -> Table:
        """Costs from each of some layouts to each of others, which have an SBP for each axis, in bytes."""
        # Those of the Partials, and sums, which a chain may pass; all but the first ones count as the last.
        partials = {
            sbp.reduction for each in (*made, *wanted) for sbp in each if isinstance(sbp, Partial)
        } | {REDUCTIONS[0]}
        if not partials.isdisjoint(REDUCTIONS[_TOLD_APART:]):
            partials.add(REDUCTIONS[_TOLD_APART - 1])
        present = tuple(each for each in REDUCTIONS[:_TOLD_APART] if each in partials)
        numbers, options = sbp_numbers(len(spec.shape), present), len(spec.shape) + len(present) + 1
        # The number of each layout along the axes of several ranks, where each SBP is one of the options.
        places = (
            [
                reduce(lambda place, axis: place * options + numbers[each[axis]], self._several, 0)
                for each in sbps
            ]
            for sbps in (made, wanted)
        )
        size = ITEM_SIZE.get(spec.dtype, 8)
        key = (size, spec.shape, present)
        if key not in self._chains:
            layouts = len(_distinct(len(spec.shape), present)) ** len(self._small)
            found = _remembered if layouts <= _FEW_LAYOUTS else _chains_of
            self._chains[key] = found(self._small, self.cost_model, spec.shape, size, present)
        return self._chains[key].between(*places)


def _chains_of(
    grid: tuple[int, ...],
    cost_model: CostModel,
    shape: tuple[int, ...],
    itemsize: int,
    present: Reductions,
) -> Chains:
    return Chains(grid_moves(grid, _distinct(len(shape), present)), cost_model, shape, itemsize)


# A process plans one step several times: for other shapes, for evaluation, without its update.
_remembered = lru_cache(maxsize=512)(_chains_of)


def reductions(made: SBPs, wanted: SBPs) -> Table:
    """1 where a Partial is made and something else is wanted, 0 elsewhere."""
    partial, final = ([isinstance(sbp, Partial) for sbp in sbps] for sbps in (made, wanted))
    return np.outer(partial, np.logical_not(final)).astype(float)


def replication_bytes(spec: TensorSpec, axis: int, others: SBPs, grid: tuple[int, ...]) -> Bytes:
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
    partials = (Partial(each) for each in REDUCTIONS[:_TOLD_APART] if each in present)
    return (Broadcast(), *partials, *map(Split, range(dims)))


@final
@dataclass(frozen=True, eq=False)
class Steps:
    """Single steps with their prices, in the order of the states that they leave; each state has one.

    Attributes:
        first: for each state, the place of its first step.
        after: for each step, the state in which it ends.
        prices: for each step, what it costs.
    """

    first: Indices
    after: Indices
    prices: Table

    @staticmethod
    def of(before: Indices, after: Indices, prices: Table, states: int) -> Steps:
        """Steps in any order; one that stays, at no cost, is added for each state."""
        every = np.arange(states)
        before = np.concatenate([every, before])
        order = np.argsort(before, kind="stable")
        return Steps(
            np.searchsorted(before[order], every),
            np.concatenate([every, after])[order],
            np.concatenate([np.zeros(states), prices])[order],
        )

    def costs(self, ends: Sequence[int]) -> Table:
        """The costs of the cheapest chains from each state to some [ends, states] (Bellman and Ford)."""
        found = np.full((len(ends), len(self.first)), np.inf)
        found[np.arange(len(ends)), ends] = 0.0
        while True:
            nearer = np.minimum.reduceat(self.prices + found[:, self.after], self.first, axis=1)
            if np.array_equal(nearer, found):
                return found
            found = nearer


@final
@dataclass(frozen=True, eq=False)
class Chains:
    """Costs of boxing one tensor on one grid, along axes of several ranks."""

    moves: GridMoves
    cost_model: CostModel
    shape: tuple[int, ...]
    itemsize: int
    _to: dict[int, Table] = field(default_factory=dict)

    def between(self, made: Sequence[int], wanted: Sequence[int]) -> Table:
        """Costs from each of some states to each of others, all by their numbers, in bytes."""
        new = [end for end in dict.fromkeys(wanted) if end not in self._to]
        if new:
            costs = self._steps.costs(new)
            grown = np.maximum(self._held[new][:, None] - self._held[None, :], 0.0)
            costs += self.cost_model.bytes_per_held * grown
            self._to.update(zip(new, costs, strict=True))
        found = np.empty((len(made), len(wanted)))
        for column, end in enumerate(wanted):
            found[:, column] = self._to[end][made]
        return found

    @cached_property
    def _steps(self) -> Steps:
        moves, boxing = self.moves, self.cost_model.bytes_per_collective
        before, after = moves.before, moves.after
        prices = moves.bytes(self.shape, self.itemsize) + boxing * moves.exchanges
        if len(moves.grid) > 1:
            # Transfers between all states without a Partial, which change several axes at once.
            whole = [each for each in moves.states if not any(isinstance(s, Partial) for s in each)]
            ends = overlaps(moves.grid, self.shape).ends(whole)
            missing = ends.held[None, :] - ends.common_with_each
            numbers = np.array([moves.numbers[state] for state in whole])
            starts, stops = (each.ravel() for each in np.meshgrid(numbers, numbers, indexing="ij"))
            before, after = np.concatenate([before, starts]), np.concatenate([after, stops])
            sent = missing.ravel().astype(np.float64) * self.itemsize + boxing
            prices = np.concatenate([prices, sent])
        return Steps.of(before, after, prices, len(moves.states))

    @cached_property
    def _held(self) -> Table:
        size = math.prod(self.shape) * self.itemsize
        return np.array(
            [size * copies(state, self.moves.grid) for state in self.moves.states], np.float64
        )
