"""From a call, of the logical graph or of one rank, to the `OpCall` that the sharding rules see.

Results that a forward saves in a form that its backward alone understands, such as the workspace of a kernel, go there
as they were made: no boxing may stand between, and no packing of micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from weft.errors import InternalError
from weft.ir.logical import Arg, Call, LogicalGraph, Node, Ref, Value, Varying, node_uses
from weft.ir.plan import LocalCall, LocalValue
from weft.layout import Layout, Split
from weft.ops import OpCall, Operand
from weft.ops.call import map_argument, tensor_spec
from weft.ops.rule import kept_readers, kept_results

# Ops that hand on what they read.
_PASSING = ("weft.after",)


_AnyCall = TypeVar("_AnyCall", Call, LocalCall)


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


def at_micro_batch(arg: Any, micro: int) -> Any:
    """An argument tree as it is in one micro-batch."""
    if isinstance(arg, Varying):
        return arg.values[micro]
    if isinstance(arg, tuple):
        return tuple(at_micro_batch(part, micro) for part in arg)
    return arg


def named_arguments(
    call: OpCall, names: Sequence[str]
) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """The argument trees of `call` with these names in place of its operands."""
    refs = [Ref(name) for name in names]

    def back(leaf: Any) -> Any:
        return refs[leaf.index] if isinstance(leaf, Operand) else leaf

    kwargs = tuple([(key, map_argument(back, arg)) for key, arg in call.kwargs])
    return map_argument(back, call.args), kwargs


def made_of(made: _AnyCall, call: OpCall, names: Sequence[str]) -> _AnyCall:
    """`made`, whose arguments are `named_arguments` of `call`, with a note of what it was made of."""
    if made.operands == tuple(names):
        made.__dict__["numbered"] = call.args, call.kwargs
        made.rule_calls.append(call)
    return made


def _op_call(
    node: Call | LocalCall,
    values: Mapping[str, Value] | Mapping[str, LocalValue],
    micro: int,
) -> OpCall:
    read = [values[name] for name in node.operands]
    operands = tuple([tensor_spec(value.shape, value.dtype) for value in read])
    results = tuple([None if v is None else tensor_spec(v.shape, v.dtype) for v in node.outputs])
    args, kwargs = node.numbered
    if node.varyings:
        args = at_micro_batch(args, micro)
        kwargs = tuple((key, at_micro_batch(arg, micro)) for key, arg in kwargs)
        return OpCall(node.op, args, kwargs, operands, results)
    for known in node.rule_calls:
        if known.operands == operands and known.results == results:
            return known
    node.rule_calls.append(OpCall(node.op, args, kwargs, operands, results))
    return node.rule_calls[-1]


def layout_of(value: Value) -> Layout:
    """The layout of a value in a graph that has layouts."""
    if value.layout is None:
        raise InternalError(f"%{value.name} has no layout")
    return value.layout


def lies_evenly(value: Value) -> bool:
    """True where all shards of a value have one shape."""
    layout, parts = layout_of(value), Counter[int]()
    for size, sbp in zip(layout.placement.shape, layout.sbp, strict=True):
        if isinstance(sbp, Split):
            parts[sbp.dim] = max(parts[sbp.dim], 1) * size
    return all(value.shape[dim] % count == 0 for dim, count in parts.items())


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
