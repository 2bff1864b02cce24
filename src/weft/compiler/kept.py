"""What a forward saves in a form that its backward alone understands, such as the workspace of a kernel.

It goes to the backward as it was made: no boxing may stand between, and no packing of micro-batches.
"""

from __future__ import annotations

from weft.errors import InternalError
from weft.ir.logical import Call, LogicalGraph, node_uses
from weft.ops.rule import kept_results

# Ops that hand on what they read.
_PASSING = ("weft.after",)


def kept_values(graph: LogicalGraph) -> frozenset[str]:
    """The names of such values."""
    return frozenset(
        value.name
        for call in graph.of_kind(Call)
        for number in kept_results(call.op)
        if (value := call.outputs[number]) is not None
    )


def check_kept(graph: LogicalGraph) -> LogicalGraph:
    """Return `graph` when such values go from calls to calls that know them.

    Raises:
        InternalError: naming the value and what reads it.
    """
    kept = kept_values(graph)
    for node in graph.nodes:
        for name in kept.intersection(node_uses(node)):
            maker = graph.producers[name]
            assert isinstance(maker, Call)
            known = (f"{maker.op}_backward", *_PASSING)
            if not isinstance(node, Call) or node.op not in known:
                raise InternalError(
                    f"%{name} of {maker.op} at {maker.location} is read by {node}; expected its "
                    "backward alone, in the layout in which it was made"
                )
    return graph
