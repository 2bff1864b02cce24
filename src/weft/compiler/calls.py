"""From a call, of the logical graph or of one rank, to the `OpCall` that the sharding rules see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weft.compiler.loops import at_micro_batch
from weft.ir.logical import Call, LogicalGraph, Ref, Value, node_uses, refs
from weft.ir.plan import LocalCall, LocalValue
from weft.ops import OpCall, Operand, TensorSpec
from weft.ops.call import map_argument


def operand_names(node: Call) -> tuple[str, ...]:
    """The distinct values that a call reads, in the order of first appearance: operand `i` is name number `i`."""
    return tuple(dict.fromkeys(node_uses(node)))


def op_call(graph: LogicalGraph, node: Call, micro: int = 0) -> OpCall:
    """`node` as an `OpCall` on whole tensors, in micro-batch `micro`; a value that is read twice is one operand."""
    return _op_call(node, operand_names(node), graph.values, micro)


def local_operands(node: LocalCall) -> tuple[str, ...]:
    """The distinct local values that a call reads, in the order of first appearance."""
    return tuple(
        dict.fromkeys((*refs(node.args), *(n for _, arg in node.kwargs for n in refs(arg))))
    )


def local_op_call(node: LocalCall, values: Mapping[str, LocalValue]) -> OpCall:
    """A call of one rank as an `OpCall`, in its first micro-batch."""
    return _op_call(node, local_operands(node), values, 0)


def _op_call(
    node: Call | LocalCall,
    names: Sequence[str],
    values: Mapping[str, Value] | Mapping[str, LocalValue],
    micro: int,
) -> OpCall:
    number = {name: index for index, name in enumerate(names)}

    def numbered(leaf: Any) -> Any:
        return Operand(number[leaf.name]) if isinstance(leaf, Ref) else leaf

    return OpCall(
        op=node.op,
        args=map_argument(numbered, at_micro_batch(node.args, micro)),
        kwargs=tuple(
            (key, map_argument(numbered, at_micro_batch(arg, micro))) for key, arg in node.kwargs
        ),
        operands=tuple(_spec(values[name]) for name in names),
        results=tuple(None if value is None else _spec(value) for value in node.outputs),
    )


def _spec(value: Value | LocalValue) -> TensorSpec:
    return TensorSpec(value.shape, value.dtype)
