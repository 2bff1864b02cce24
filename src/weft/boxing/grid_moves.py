"""All single steps between the layouts of one grid, as arrays: the shape of a tensor only decides what they move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import final

import numpy as np
import numpy.typing as npt

from weft.boxing.overlaps import Indices, State, overlaps
from weft.boxing.path import changes, copies
from weft.boxing.transfer import EXCHANGES, step_bytes
from weft.cached import cached_property
from weft.layout import Split
from weft.units import Bytes


@final
@dataclass(frozen=True, eq=False)
class GridMoves:
    """The steps that change the SBP of one axis, in the order of the states that they leave.

    Attributes:
        before, after: for each step, the numbers of two states.
        exchanges: for each step, true where ranks talk to each other.
        moved, parts: for each step, the bytes of the tensor that it moves over all ranks, as numerators and divisors.
        swaps: the numbers of the steps from one split to another, and the dimensions of these [steps, 2].
    """

    grid: tuple[int, ...]
    states: tuple[State, ...]
    before: Indices
    after: Indices
    exchanges: npt.NDArray[np.bool_]
    moved: Indices
    parts: Indices
    swaps: tuple[Indices, Indices]

    @cached_property
    def numbers(self) -> dict[State, int]:
        """The number of each state."""
        return {state: number for number, state in enumerate(self.states)}

    def bytes(self, shape: tuple[int, ...], itemsize: int) -> Indices:
        """Bytes that each step moves over all ranks, of a tensor of whole `shape`."""
        found: Indices = self.moved * (math.prod(shape) * itemsize) // self.parts
        steps, dims = self.swaps
        divides = np.array([size % math.prod(self.grid) == 0 for size in shape], dtype=bool)
        uneven = steps[~divides[dims].all(axis=1)] if len(steps) else steps
        if len(uneven):
            left = [self.states[number] for number in self.before[uneven]]
            reached = [self.states[number] for number in self.after[uneven]]
            found[uneven] = overlaps(self.grid, shape).missing(left, reached) * itemsize
        return found


@lru_cache(maxsize=64)
def grid_moves(grid: tuple[int, ...], options: State) -> GridMoves:
    """The steps between all layouts of a grid that are made of some SBPs; each axis has several ranks."""
    states = tuple(product(options, repeat=len(grid)))
    number = {state: place for place, state in enumerate(states)}
    every = [
        (kind, axis, state, after)
        for state in states
        for kind, axis, after in changes(state, grid, options)
    ]
    swaps = [place for place, (kind, *_) in enumerate(every) if kind == "all_to_all"]
    dims = [_dims(state[axis], after[axis]) for _, axis, state, after in (every[s] for s in swaps)]
    # An all-to-all moves a part of the tensor; the others a multiple.
    parts = [grid[axis] if kind == "all_to_all" else 1 for kind, axis, *_ in every]
    return GridMoves(
        grid,
        states,
        _array([number[state] for *_, state, _ in every]),
        _array([number[after] for *_, after in every]),
        np.array([kind in EXCHANGES for kind, *_ in every], dtype=bool),
        _array(
            [
                step_bytes(kind, grid[axis], Bytes(copies(state, grid, axis) * part))
                for (kind, axis, state, _), part in zip(every, parts, strict=True)
            ]
        ),
        _array(parts),
        (_array(swaps), _array(dims).reshape(-1, 2)),
    )


def _dims(one: object, other: object) -> tuple[int, int]:
    assert isinstance(one, Split)
    assert isinstance(other, Split)
    return one.dim, other.dim


def _array(numbers: Sequence[object]) -> Indices:
    return np.array(numbers, dtype=np.int64)
