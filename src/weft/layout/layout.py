"""Layout: a placement and one SBP for each axis of its grid; the shards, shares and regions of a tensor that follow.

The first `size % parts` shards of a dimension hold one element more (5 over 4 is 2, 1, 1, 1), as in OneFlow;
`torch.chunk` would give 2, 2, 1, 0. Shares are parts that a dimension joins, stored so that one split cuts every part.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias, final

from weft.cached import cached_property
from weft.errors import LayoutError
from weft.layout.placement import Placement
from weft.layout.sbp import SBP, Broadcast, Partial, Split, check_reduction

Region: TypeAlias = tuple[tuple[int, int], ...]


def shard_region(
    shape: tuple[int, ...], sbps: Iterable[SBP], grid: Iterable[int], position: Iterable[int]
) -> Region:
    """The region of a tensor of whole `shape` that is at a position of a grid; splits of one dimension nest."""
    ranges = [(0, size) for size in shape]
    for sbp, parts, index in zip(sbps, grid, position, strict=True):
        if isinstance(sbp, Split):
            start, length = ranges[sbp.dim]
            offset, length = shard_range(length, parts, index)
            ranges[sbp.dim] = (start + offset, length)
    return tuple(ranges)


def region_shape(region: Region) -> tuple[int, ...]:
    """Length of each dimension."""
    return tuple(length for _, length in region)


def region_size(region: Region) -> int:
    """Number of elements; 1 in a tensor of no dimensions."""
    return math.prod(length for _, length in region)


def overlap(one: Region, other: Region) -> Region:
    """The region that two regions of one tensor have in common; its size is 0 when there is none."""
    found = []
    for (start, length), (start_of_other, length_of_other) in zip(one, other, strict=True):
        first = max(start, start_of_other)
        end = min(start + length, start_of_other + length_of_other)
        found.append((first, max(end - first, 0)))
    return tuple(found)


def within(region: Region, outer: Region) -> Region:
    """`region` as seen from the corner of `outer`, in which it lies."""
    return tuple((at - corner, n) for (at, n), (corner, _) in zip(region, outer, strict=True))


def shard_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """Offset and length of piece `index` of a dimension of `size` elements cut into `parts`."""
    base, extra = divmod(size, parts)
    return index * base + min(index, extra), base + (index < extra)


def shard_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Lengths of all pieces of a dimension of `size` elements cut into `parts`."""
    return tuple(shard_range(size, parts, index)[1] for index in range(parts))


@final
@dataclass(frozen=True, slots=True)
class Shares:
    """The order of a dimension that joins parts, such as the rows of queries, keys and values in one matrix.

    In the user's order, the parts follow each other. Stored in shares, the dimension is `blocks` equal
    blocks, and each of them holds its share of every part, in the order of the parts. A split over
    `blocks` ranks then gives each its rows of each part, as Megatron-LM stores such a matrix.

    Attributes:
        dim: the dimension.
        parts: lengths of the parts; `blocks` divides each.
        blocks: their number.
    """

    dim: int
    parts: tuple[int, ...]
    blocks: int

    def __post_init__(self) -> None:
        if self.blocks < 1 or any(part < 1 or part % self.blocks for part in self.parts):
            raise LayoutError(
                f"{self.blocks} blocks do not divide each of the parts {self.parts}; use a number of blocks that "
                "divides them all"
            )

    @property
    def size(self) -> int:
        """The size of the dimension."""
        return sum(self.parts)

    @property
    def pieces(self) -> frozenset[tuple[int, int]]:
        """The begin and the end of each part, as users know the dimension."""
        return frozenset(pairwise((0, *accumulate(self.parts))))

    def in_blocks(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape with the blocks apart: [..., size, ...] -> [..., blocks, size / blocks, ...]."""
        before, size, after = shape[: self.dim], shape[self.dim], shape[self.dim + 1 :]
        return (*before, self.blocks, size // self.blocks, *after)

    def __str__(self) -> str:
        return f"shares {self.dim} [{', '.join(map(str, self.parts))}] {self.blocks}"


@final
@dataclass(frozen=True)
class Layout:
    """The layout of a tensor: `sbp[i]` says how it is laid out along axis `i` of `placement`.

    Splits of the same dimension on several axes nest: the first axis cuts the whole dimension, the
    next cuts the pieces.
    """

    placement: Placement
    sbp: tuple[SBP, ...]

    def __post_init__(self) -> None:
        if len(self.sbp) != self.placement.axes:
            raise LayoutError(
                f"a layout needs one SBP for each of the {self.placement.axes} axes of {self.placement}, "
                f"got ({', '.join(map(str, self.sbp))}); give one for each, B where nothing is split"
            )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Layouts are looked up all the time."""
        return hash((self.placement, self.sbp))

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise LayoutError when a split names a dimension that a tensor of `shape` does not have."""
        for sbp in self.sbp:
            if isinstance(sbp, Split) and not 0 <= sbp.dim < len(shape):
                raise LayoutError(
                    f"{self} splits dimension {sbp.dim}, but the tensor of shape {list(shape)} has dimensions "
                    f"0 to {len(shape) - 1}; split one of these, or use weft.broadcast"
                )

    def check_dtype(self, dtype: str) -> None:
        """Raise LayoutError when a tensor of `dtype` cannot be reduced as a Partial of this layout says."""
        for sbp in self.sbp:
            if isinstance(sbp, Partial):
                check_reduction(sbp.reduction, dtype)

    def local_ranges(self, shape: tuple[int, ...], rank: int) -> Region:
        """(offset, length) of each dimension of the part that `rank` holds of a tensor of whole `shape`."""
        position = self.placement.coordinates[rank]
        return shard_region(shape, self.sbp, self.placement.shape, position)

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Shape of the part that `rank` holds of a tensor of whole `shape`."""
        return region_shape(self.local_ranges(shape, rank))

    def with_axis(self, axis: int, sbp: SBP) -> Layout:
        """This layout with another SBP on one axis."""
        return Layout(self.placement, self.sbp[:axis] + (sbp,) + self.sbp[axis + 1 :])

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.sbp))}) on {self.placement}"


def broadcast_layout(placement: Placement) -> Layout:
    """The layout that holds the whole tensor on every rank of `placement`."""
    return Layout(placement, (Broadcast(),) * placement.axes)
