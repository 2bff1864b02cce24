"""Argument trees of micro-batches, and leaves of the batch that are cut into them."""

from __future__ import annotations

from typing import Any

from weft.ir.logical import Input, LogicalGraph, Varying


def at_micro_batch(arg: Any, micro: int) -> Any:
    """An argument tree as it is in one micro-batch."""
    if isinstance(arg, Varying):
        return arg.values[micro]
    if isinstance(arg, tuple):
        return tuple(at_micro_batch(part, micro) for part in arg)
    return arg


def joined(parts: tuple[Any, ...]) -> Any:
    """One argument tree from those of all micro-batches: `Varying` where leaves differ.

    All parts must have the same tuples in them.
    """
    if all(part == parts[0] and type(part) is type(parts[0]) for part in parts):
        return parts[0]
    if all(isinstance(part, tuple) and len(part) == len(parts[0]) for part in parts):
        return tuple(joined(leaves) for leaves in zip(*parts, strict=True))
    return Varying(parts)


def cut_leaves(graph: LogicalGraph) -> frozenset[str]:
    """The inputs that hold a leaf of the batch as (micro-batches, part of the batch, ...)."""
    return frozenset(node.value.name for node in graph.of_kind(Input) if node.cut)
