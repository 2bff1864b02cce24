"""Balanced shard arithmetic: which part of a dimension each rank holds.

The first `size % parts` shards hold one element more (5 over 4 is 2, 1, 1, 1), as in OneFlow.
`torch.chunk` would give 2, 2, 1, 0.
"""

from __future__ import annotations


def shard_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """Offset and length of piece `index` of a dimension of `size` elements cut into `parts`."""
    base, extra = divmod(size, parts)
    return index * base + min(index, extra), base + (index < extra)


def shard_sizes(size: int, parts: int) -> tuple[int, ...]:
    """Lengths of all pieces of a dimension of `size` elements cut into `parts`."""
    return tuple(shard_range(size, parts, index)[1] for index in range(parts))
