"""The cheapest chains of steps between the layouts of one tensor, to those ends that are asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from weft.boxing.grid_moves import GridMoves
from weft.boxing.overlaps import Indices, overlaps
from weft.boxing.path import copies
from weft.cached import cached_property
from weft.hardware import CostModel
from weft.layout import Partial

Table: TypeAlias = npt.NDArray[np.float64]


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
    """Costs of boxing one tensor on one grid, along axes of several ranks.

    Attributes:
        moves: of the grid.
        cost_model: what boxing costs.
        shape: whole shape of the tensor.
        itemsize: bytes of one element.
    """

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
        prices = moves.bytes(self.shape, self.itemsize) + boxing * moves.exchanges
        before, after, price = self._transfers if len(moves.grid) > 1 else _NONE
        return Steps.of(
            np.concatenate([moves.before, before]),
            np.concatenate([moves.after, after]),
            np.concatenate([prices, price]),
            len(moves.states),
        )

    @property
    def _transfers(self) -> tuple[Indices, Indices, Table]:
        """Transfers between all states without a Partial, which change several axes at once."""
        moves = self.moves
        whole = [state for state in moves.states if not any(isinstance(s, Partial) for s in state)]
        ends = overlaps(moves.grid, self.shape).ends(whole)
        missing = ends.held[None, :] - ends.common_with_each
        numbers = np.array([moves.numbers[state] for state in whole])
        before, after = (each.ravel() for each in np.meshgrid(numbers, numbers, indexing="ij"))
        prices = missing.ravel().astype(np.float64) * self.itemsize
        return before, after, prices + self.cost_model.bytes_per_collective

    @cached_property
    def _held(self) -> Table:
        """Bytes that all ranks together hold in each state."""
        size = math.prod(self.shape) * self.itemsize
        return np.array(
            [size * copies(state, self.moves.grid) for state in self.moves.states], np.float64
        )


_NONE: tuple[Indices, Indices, Table] = (
    np.empty(0, np.int64),
    np.empty(0, np.int64),
    np.empty(0),
)
