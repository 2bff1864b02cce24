"""Results that a forward saves in a form that its backward alone understands, such as the workspace of a kernel.

It goes to the backward as it was made: no boxing may stand between, and no packing of micro-batches.
The rules of ops say which results are so, and which ops understand them.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.ir.logical import Call, LogicalGraph, Node, node_uses
from weft.ops.rule import kept_readers, kept_results

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


def kept_values_stay(graph: LogicalGraph) -> Iterator[tuple[Node, str]]:
    """A value that only the backward of its maker understands is read by nothing else."""
    kept = kept_values(graph)
    for node in graph.nodes if kept else ():
        for name in kept.intersection(node_uses(node)):
            maker = graph.producers[name]
            assert isinstance(maker, Call)
            known = (*kept_readers(maker.op), *_PASSING)
            if not isinstance(node, Call) or node.op not in known:
                problem = f"%{name} of {maker.op} at {maker.location} is read; expected its backward alone"
                yield node, f"{problem}, in the layout in which it was made"
