"""The SBP signatures that a graph with layouts gives its calls, and the check that their rules allow them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from weft.compiler.hints import is_hint
from weft.errors import InternalError
from weft.ir.logical import Call, LogicalGraph
from weft.layout import Broadcast
from weft.ops import Signature, localize, signatures_with_windows


def axis_signatures(graph: LogicalGraph, node: Call) -> Iterator[tuple[Signature, int]]:
    """For each axis of the grid, outermost first: the signature of `node` and the number of ranks."""
    operands = [graph.values[name].laid for name in node.operands]
    results = [None if value is None else value.laid for value in node.outputs]
    placement = next(layout for layout in (*operands, *results) if layout).placement
    for axis, parts in enumerate(placement.shape):
        before = tuple(layout.sbp[axis] for layout in operands)
        after = tuple(layout.sbp[axis] if layout else Broadcast() for layout in results)
        yield Signature(before, after), parts


def check_signatures(graph: LogicalGraph) -> LogicalGraph:
    """Return `graph` when the rule of every call allows the layouts around it.

    Raises:
        InternalError: naming the call, its signature and the axis.
    """
    checked: set[Hashable] = (
        set()
    )  # equal calls, such as those of repeated layers, are checked once
    for node in graph.of_kind(Call):
        if is_hint(node):
            continue
        call = node.first
        operands = tuple([graph.values[name].layout for name in node.operands])
        key = call, operands, tuple([value and value.layout for value in node.outputs])
        if key in checked:
            continue
        checked.add(key)
        for axis, (signature, parts) in enumerate(axis_signatures(graph, node)):
            if signature not in signatures_with_windows(call, parts, empty=True):
                raise InternalError(
                    f"{node.op} at {node.location}: no rule allows {signature} on axis {axis}"
                )
            # The largest shard stands for all: it is what deduction looked at.
            call = localize(call, signature, parts, 0)
    return graph
