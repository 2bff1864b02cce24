"""The elements that all ranks of a grid hold together in a state, and those that they hold in two states both.

A shard is as long along a dimension as the axes that split it say; those of two states overlap there as the axes of
both say. Ranks for which all these lengths are the same are counted, not looked at one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import final

import numpy as np

from weft.boxing.regions import Indices, State, regions_of
from weft.cached import cached_property
from weft.layout import Broadcast, Split


@final
@dataclass(frozen=True, eq=False)
class Overlaps:
    """The overlaps of shards on one grid, of tensors of one shape.

    Attributes:
        ranks: how many there are of each kind: those of one kind differ in no overlap.
        tables: for each dimension [axes, axes, kinds]: the length that the shards of two states have in common, by
            the axes of each that split the dimension, written as the bits of a number.
    """

    ranks: Indices
    tables: tuple[Indices, ...]

    def ends(self, states: Sequence[State]) -> Ends:
        """Some states, to which others are compared."""
        return Ends(
            self, len(states), tuple([_splitting(states, dim) for dim in range(len(self.tables))])
        )

    def missing(self, before: Sequence[State], after: Sequence[State]) -> Indices:
        """For each pair of states, the elements that ranks must receive, all together, to go from one to the other."""
        ends = self.ends(after)
        own = [_splitting(before, dim) for dim in range(len(self.tables))]
        every = zip(self.tables, ends.splitting, own, strict=True)
        both = self.sums((len(after),), (table[one, other] for table, one, other in every))
        return ends.held - both

    def sums(self, states: tuple[int, ...], lengths: Iterable[Indices]) -> Indices:
        """Elements over all ranks, of shards whose lengths along each dimension are given [*states, kinds]."""
        sizes = np.ones((*states, len(self.ranks)), dtype=np.int64)
        for each in lengths:
            sizes *= each
        found: Indices = sizes @ self.ranks
        return found


@final
@dataclass(frozen=True, eq=False)
class Ends:
    """States in which transfers end.

    Attributes:
        overlaps: of shards.
        count: of the states.
        splitting: for each dimension and state, the axes that split it, as the bits of a number.
    """

    overlaps: Overlaps
    count: int
    splitting: tuple[list[int], ...]

    @cached_property
    def held(self) -> Indices:
        """For each state, the elements that all ranks hold together."""
        pairs = zip(self.overlaps.tables, self.splitting, strict=True)
        return self.overlaps.sums((self.count,), (table[own, own] for table, own in pairs))

    def common(self, other: State) -> Indices:
        """For each state, the elements that ranks hold in it and in another."""
        found = []
        for dim, table in enumerate(self.overlaps.tables):
            (one,) = _splitting((other,), dim)
            found.append(table[self.splitting[dim], one])
        return self.overlaps.sums((self.count,), found)

    @cached_property
    def common_with_each(self) -> Indices:
        """The elements that ranks hold in one state and in another [states, states]."""
        pairs = zip(self.overlaps.tables, self.splitting, strict=True)
        lengths = (table[np.ix_(own, own)] for table, own in pairs)
        return self.overlaps.sums((self.count, self.count), lengths)


@lru_cache(maxsize=4096)
def overlaps(grid: tuple[int, ...], shape: tuple[int, ...]) -> Overlaps:
    """The overlaps of shards of a tensor of whole `shape` on a grid."""
    by_length = {size: _table(grid, size) for size in dict.fromkeys(shape)}
    kinds = np.zeros(int(np.prod(grid)), dtype=np.int64)
    for table in by_length.values():
        for row in table.reshape(-1, table.shape[-1]):
            if (row != row[0]).any():
                _, of = np.unique(row, return_inverse=True)
                _, kinds = np.unique(kinds * len(row) + of, return_inverse=True)
    _, first, ranks = np.unique(kinds, return_index=True, return_counts=True)
    return Overlaps(ranks, tuple([by_length[size][:, :, first] for size in shape]))


@lru_cache(maxsize=1024)
def _table(grid: tuple[int, ...], size: int) -> Indices:
    """For a dimension: the length that the shards of two states have in common, [axes, axes, ranks]."""
    states = [state[::-1] for state in product((Broadcast(), Split(0)), repeat=len(grid))]
    starts, ends = (each[:, :, 0] for each in regions_of(tuple(states), grid, (size,)))
    first = np.maximum(starts[:, None], starts[None])
    found: Indices = np.maximum(np.minimum(ends[:, None], ends[None]) - first, 0)
    return found


def _splitting(states: Sequence[State], dim: int) -> list[int]:
    """For each state, the axes that split a dimension, as the bits of a number."""
    split = Split(dim)
    return [sum([1 << axis for axis, sbp in enumerate(state) if sbp == split]) for state in states]
