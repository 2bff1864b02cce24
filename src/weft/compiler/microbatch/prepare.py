"""Before a batch is cut in time: what need not wait for micro-batches stands alone.

That is what only borrows a shape or a device, counts of targets, and sums over a leaf of the batch, which are taken
of the leaf as it is cut, once a step, so that no rank has to gather it.
"""

from __future__ import annotations

from math import prod
from typing import Any

from weft.compiler.families.table import family_of
from weft.compiler.graph.rewriting import only_result
from weft.ir.logical import Call, Input, LogicalGraph, Node, Ref, Varying
from weft.ir.nodes import renamed
from weft.ops.call import Token
from weft.ops.rule import factors_of
from weft.ops.rules.common import pointwise
from weft.ops.rules.tensors.views import reshape_factors

# Ops that take device, dtype or shape from a tensor whose values do not matter; what each is
# without it, and where its value stands in the arguments.
_BORROWERS: dict[str, tuple[str, int | None]] = {
    "aten.new_zeros.default": ("aten.zeros.default", None),
    "aten.new_ones.default": ("aten.ones.default", None),
    "aten.new_empty.default": ("aten.empty.memory_format", None),
    "aten.new_full.default": ("aten.full.default", 2),
    "aten.zeros_like.default": ("aten.zeros.default", None),
    "aten.ones_like.default": ("aten.ones.default", None),
    "aten.empty_like.default": ("aten.empty.memory_format", None),
    "aten.full_like.default": ("aten.full.default", 1),
    "aten.zero.default": ("aten.zeros.default", None),
    "aten.fill.Scalar": ("aten.full.default", 1),
}


def prepared(graph: LogicalGraph, device_type: str) -> LogicalGraph:
    """The same step, in which fewer values depend on others."""
    nodes: list[Node] = []
    names: dict[str, str] = {}
    for node in graph.nodes:
        family = family_of(node.op) if isinstance(node, Call) else None
        if not (family and isinstance(node, Call) and family.ignores_counts(node)):
            node = renamed(node, names)
        if isinstance(node, Call) and node.op in _BORROWERS:
            node = _alone(node, device_type)
        if family is not None and isinstance(node, Call):
            for result, counting in family.counts(graph, node):
                nodes += counting
                names[result] = only_result(counting[-1]).name
        nodes.append(node)
    return graph.with_nodes(nodes)


def _alone(node: Call, device_type: str) -> Call:
    """A call that makes the same from nothing."""
    op, position = _BORROWERS[node.op]
    made = only_result(node)
    device = dict(node.kwargs).get("device", Token("device", device_type))
    value = () if position is None else (node.args[position],)
    if any(isinstance(each, Ref) for each in value):
        return node
    kwargs = (("dtype", Token("dtype", made.dtype)), ("device", device))
    return node.changed(op=op, args=(made.shape, *value), kwargs=kwargs)


_SUM_OP = "aten.sum.default"


def sum_of_leaf(
    graph: LogicalGraph, name: str, leaves: frozenset[str]
) -> tuple[str, tuple[Call, ...]] | None:
    """The leaf that `name` sums up, and the calls on its elements in between, the sum last.

    None when it is no such sum. Where elements stand does not matter to a sum, so views are left
    out.
    """
    node = graph.producers[name]
    if not isinstance(node, Call) or node.op != _SUM_OP:
        return None
    calls = [node]
    (current,) = node.operands
    while current not in leaves:
        maker = graph.producers[current]
        if not isinstance(maker, Call) or not _keeps_elements(graph, maker):
            return None
        if factors_of(maker.op) is pointwise:
            calls.append(maker)
        (current,) = maker.operands
    return current, tuple(reversed(calls))


def _keeps_elements(graph: LogicalGraph, node: Call) -> bool:
    """True where a call makes one element of each element of its only operand."""
    operands = node.operands
    if len(operands) != 1 or len(node.outputs) != 1 or node.outputs[0] is None:
        return False
    before, after = graph.values[operands[0]].shape, node.outputs[0].shape
    if factors_of(node.op) is reshape_factors:
        return prod(before) == prod(after)
    return factors_of(node.op) is pointwise and before == after


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
