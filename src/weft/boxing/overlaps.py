"""Numbers of elements that the ranks of a grid hold in one layout, and in both of two layouts.

The axes that split a dimension determine the length of a shard and the
overlap of two shards. Ranks with the same lengths are counted together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from weft.cached import cached_property
from weft.ir.plan import Collective
from weft.layout import SBP, Broadcast, Split
from weft.units import ITEM_SIZE, Bytes


@final
@dataclass(frozen=True, eq=False)
class Overlaps:
    """The overlaps of shards on one grid, of tensors of one shape.

    Attributes:
        ranks: how many there are of each kind; ranks of one kind have equal overlaps.
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
    split = Split(dim)
    return [sum([1 << axis for axis, sbp in enumerate(state) if sbp == split]) for state in states]


# For an input that is reduced and scattered, so many bytes are sent at a time.
SLICE = 256 * 2**20


@final
@dataclass(frozen=True, slots=True)
class Slices:
    """A reduce-scatter in slices: every rank's piece is cut along `axis`, its `extent`, into `length` at a time.

    Attributes:
        bytes: of the pieces of a slice together.
    """

    axis: int
    extent: int
    length: int
    bytes: Bytes


def slices_of(each: Collective) -> Slices | None:
    """Slices for a reduce-scatter of a large input, to keep memory beside its result small; None to run in one go."""
    whole = each.input.nbytes
    if whole <= SLICE or not math.prod(each.sizes):
        return None
    piece = list(each.input.shape)
    piece[each.dim] = max(each.sizes)
    axis = max(range(len(piece)), key=piece.__getitem__)
    length = math.ceil(piece[axis] / math.ceil(whole / SLICE))
    part = len(each.sizes) * math.prod(piece) // piece[axis] * length
    return Slices(axis, piece[axis], length, Bytes(part * ITEM_SIZE[each.input.dtype]))


State: TypeAlias = tuple[SBP, ...]
Indices: TypeAlias = npt.NDArray[np.int64]


@lru_cache(maxsize=4096)
def regions_of(
    states: tuple[State, ...], grid: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Indices, Indices]:
    """Starts and ends of the regions of each state: arrays [states, ranks, dimensions]."""
    found = [_state_regions(state, grid, shape) for state in states]
    table = np.array(found, dtype=np.int64).reshape(len(states), 2, math.prod(grid), len(shape))
    return table[:, 0], table[:, 1]


@lru_cache(maxsize=4096)
def _state_regions(state: State, grid: tuple[int, ...], shape: tuple[int, ...]) -> Indices:
    """Starts and ends of the regions of one state, as `shard_region` has them: an array [2, ranks, dimensions].

    All positions at once, with the arithmetic of `shard_range`.
    """
    positions = np.indices(grid, dtype=np.int64).reshape(len(grid), -1)
    starts = np.zeros((positions.shape[1], len(shape)), dtype=np.int64)
    lengths = starts + np.array(shape, dtype=np.int64)
    for sbp, parts, index in zip(state, grid, positions, strict=True):
        if isinstance(sbp, Split):
            base, extra = np.divmod(lengths[:, sbp.dim], parts)
            starts[:, sbp.dim] += index * base + np.minimum(index, extra)
            lengths[:, sbp.dim] = base + (index < extra)
    return np.stack((starts, starts + lengths))
