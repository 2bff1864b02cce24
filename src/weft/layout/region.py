"""Regions: boxes of a tensor, as (offset, length) of each dimension."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

from weft.layout.sbp import SBP, Split
from weft.layout.shard import shard_range

Region: TypeAlias = tuple[tuple[int, int], ...]


def shard_region(
    shape: tuple[int, ...], sbps: Iterable[SBP], grid: Iterable[int], position: Iterable[int]
) -> Region:
    """The region of a tensor of whole `shape` that lies at a position of a grid; splits of one dimension nest."""
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
