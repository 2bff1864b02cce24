"""Layouts of a graph's inputs by key, and which part of a whole tensor, or which rows of a batch, a rank takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.ir import LogicalGraph
from weft.ir.logical import Input, Role
from weft.layout import Layout, Shares
from weft.layout.layout import Region


def layouts_on(graph: LogicalGraph, rank: int, *roles: Role) -> dict[str, Layout]:
    """The layouts of the inputs of some roles that `rank` holds a part of, by key."""
    return {
        node.key: node.value.layout
        for node in graph.of_kind(Input)
        if node.role in roles
        and node.value.layout is not None
        and rank in node.value.layout.placement.coordinates
    }


def shares_of(graph: LogicalGraph) -> dict[str, Shares]:
    """The variables that are stored in shares, by key."""
    inputs = graph.of_kind(Input)
    return {node.key: node.shares for node in inputs if node.shares is not None}


def rows_in(shape: tuple[int, ...], region: Region, cut: bool) -> list[int]:
    """The rows of a batch that lie in a region of an input, in its order; `cut` where that is of micro-batches."""
    first, count = region[0]
    if not cut:
        return list(range(first, first + count))
    begin, length = region[1]
    return [
        micro * shape[1] + row
        for micro in range(first, first + count)
        for row in range(begin, begin + length)
    ]


def rows_of(
    inputs: Iterable[tuple[tuple[int, ...], tuple[int, ...], Sequence[Region]]], size: int
) -> list[int]:
    """The rows of a batch of so many that some ranks take; all where leaves have another number of rows.

    Args:
        inputs: for each leaf its shape, that of its input, and what each rank takes of that.
        size: how many rows the whole batch has.
    """
    found: set[int] = set()
    for leaf, shape, regions in inputs:
        if leaf[:1] != (size,):
            return list(range(size))
        for region in regions:
            found.update(rows_in(shape, region, len(shape) > len(leaf)))
    return sorted(found)
