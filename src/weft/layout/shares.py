"""Shares: a dimension that joins several parts, stored so that one split cuts every part."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

from weft.errors import LayoutError


@final
@dataclass(frozen=True, slots=True)
class Shares:
    """The order of a dimension that joins parts, such as the rows of queries, keys and values in one matrix.

    As users know it, part stands behind part. Stored in shares, the dimension is `blocks` equal
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
        """Of the dimension."""
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
