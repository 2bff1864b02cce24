"""Pieces: boxes of a tensor, where each lies in the whole tensor as users know it, and in a rank's part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import final

from weft.layout import Layout, Shares
from weft.layout.region import Region, region_size


@final
@dataclass(frozen=True)
class Piece:
    """A box of a tensor.

    Attributes:
        whole: where it lies in the tensor, (offset, length) of each dimension.
        local: where it lies in the part of the rank that holds it.
    """

    whole: Region
    local: Region


def pieces_of(
    shape: tuple[int, ...], layout: Layout, shares: Shares | None, rank: int
) -> tuple[Piece, ...]:
    """The pieces of a tensor of whole `shape` that a rank holds, none of them empty; its part lies in `shares`."""
    region = layout.local_ranges(shape, rank)
    if not region_size(region):
        return ()
    local = tuple((0, length) for _, length in region)
    if shares is None:
        return (Piece(region, local),)
    dim = shares.dim
    return tuple(
        Piece(
            (*region[:dim], (place, length), *region[dim + 1 :]),
            (*local[:dim], (offset, length), *local[dim + 1 :]),
        )
        for place, offset, length in _runs(shares, *region[dim])
    )


def _runs(shares: Shares, start: int, length: int) -> Iterator[tuple[int, int, int]]:
    """The runs of a stretch of a dimension that is stored in shares: place as users know it, offset in it, length."""
    end, stored = start + length, 0
    begins = (0, *accumulate(shares.parts))
    for block in range(shares.blocks):
        for begin, part in zip(begins, shares.parts, strict=False):
            own = part // shares.blocks
            first, last = max(stored, start), min(stored + own, end)
            if first < last:
                yield begin + block * own + first - stored, first - start, last - first
            stored += own
