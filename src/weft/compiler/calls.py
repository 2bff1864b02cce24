"""From a call, of the logical graph or of one rank, to the `OpCall` that the sharding rules see."""

from __future__ import annotations

from collections.abc import Mapping

from weft.compiler.loops import at_micro_batch
from weft.ir.logical import Call, LogicalGraph, Value
from weft.ir.plan import LocalCall, LocalValue
from weft.ops import OpCall, TensorSpec
from weft.ops.call import tensor_spec


def operand_names(node: Call) -> tuple[str, ...]:
    """The distinct values that a call reads, in the order of first appearance: operand `i` is name number `i`."""
    return node.operands


def op_call(graph: LogicalGraph, node: Call, micro: int = 0) -> OpCall:
    """`node` as an `OpCall` on whole tensors, in micro-batch `micro`; a value that is read twice is one operand."""
    return _op_call(node, graph.values, micro)


def local_operands(node: LocalCall) -> tuple[str, ...]:
    """The distinct local values that a call reads, in the order of first appearance."""
    return node.operands


def local_op_call(node: LocalCall, values: Mapping[str, LocalValue]) -> OpCall:
    """A call of one rank as an `OpCall`, in its first micro-batch."""
    return _op_call(node, values, 0)


def _op_call(
    node: Call | LocalCall,
    values: Mapping[str, Value] | Mapping[str, LocalValue],
    micro: int,
) -> OpCall:
    args, kwargs = node.numbered
    if node.varyings:
        args = at_micro_batch(args, micro)
        kwargs = tuple((key, at_micro_batch(arg, micro)) for key, arg in kwargs)
    return OpCall(
        node.op,
        args,
        kwargs,
        tuple([_spec(values[name]) for name in node.operands]),
        tuple([None if value is None else _spec(value) for value in node.outputs]),
    )


def _spec(value: Value | LocalValue) -> TensorSpec:
    return tensor_spec(value.shape, value.dtype)
