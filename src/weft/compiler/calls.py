"""From a call of the logical graph to the `OpCall` that the sharding rules see."""

from __future__ import annotations

from typing import Any

from weft.compiler.loops import at_micro_batch
from weft.ir.logical import Call, LogicalGraph, Ref, Value, node_uses
from weft.ops import OpCall, Operand, TensorSpec
from weft.ops.call import map_argument


def operand_names(node: Call) -> tuple[str, ...]:
    """The distinct values that a call reads, in the order of first appearance: operand `i` is name number `i`."""
    return tuple(dict.fromkeys(node_uses(node)))


def op_call(graph: LogicalGraph, node: Call, micro: int = 0) -> OpCall:
    """`node` as an `OpCall` on whole tensors, in micro-batch `micro`; a value that is read twice is one operand."""
    names = operand_names(node)
    number = {name: index for index, name in enumerate(names)}

    def numbered(leaf: Any) -> Any:
        return Operand(number[leaf.name]) if isinstance(leaf, Ref) else leaf

    return OpCall(
        op=node.op,
        args=map_argument(numbered, at_micro_batch(node.args, micro)),
        kwargs=tuple(
            (key, map_argument(numbered, at_micro_batch(arg, micro))) for key, arg in node.kwargs
        ),
        operands=tuple(_spec(graph.values[name]) for name in names),
        results=tuple(None if value is None else _spec(value) for value in node.outputs),
    )


def _spec(value: Value) -> TensorSpec:
    return TensorSpec(value.shape, value.dtype)
