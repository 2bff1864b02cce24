"""Sums over a leaf of the batch, once a step: of the leaf as it is cut, so that no rank has to gather it."""

from __future__ import annotations

from math import prod

from weft.ir.logical import Call, LogicalGraph
from weft.ir.op_calls import operand_names
from weft.ops.rule import factors_of
from weft.ops.rules.common import pointwise
from weft.ops.rules.views import reshape_factors

_SUM = "aten.sum.default"


def sum_of_leaf(
    graph: LogicalGraph, name: str, leaves: frozenset[str]
) -> tuple[str, tuple[Call, ...]] | None:
    """The leaf that `name` sums up, and the calls on its elements in between, the sum last.

    None when it is no such sum. Where elements stand does not matter to a sum, so views are left
    out.
    """
    node = graph.producers[name]
    if not isinstance(node, Call) or node.op != _SUM:
        return None
    calls = [node]
    (current,) = operand_names(node)
    while current not in leaves:
        maker = graph.producers[current]
        if not isinstance(maker, Call) or not _keeps_elements(graph, maker):
            return None
        if factors_of(maker.op) is pointwise:
            calls.append(maker)
        (current,) = operand_names(maker)
    return current, tuple(reversed(calls))


def _keeps_elements(graph: LogicalGraph, node: Call) -> bool:
    """Whether a call makes one element of each element of its only operand."""
    operands = operand_names(node)
    if len(operands) != 1 or len(node.outputs) != 1 or node.outputs[0] is None:
        return False
    before, after = graph.values[operands[0]].shape, node.outputs[0].shape
    if factors_of(node.op) is reshape_factors:
        return prod(before) == prod(after)
    return factors_of(node.op) is pointwise and before == after
