"""From a call on the whole batch to the call that runs once for each micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.compiler.calls import made_of, named_arguments
from weft.compiler.loops import joined
from weft.errors import InternalError
from weft.ir.logical import Call, Value
from weft.ops import OpCall, Signature, localize


def micro_call(
    node: Call, call: OpCall, signature: Signature, reads: Sequence[Value], parts: int
) -> Call:
    """`node` under a signature along time; the names of its outputs stay.

    Args:
        node: a call of the whole-batch graph.
        call: the same as rules see it.
        signature: one of `call`.
        reads: what each operand reads now.
        parts: number of micro-batches.
    """
    return reading(node, of_parts(node, call, signature, parts), reads)


def of_parts(node: Call, call: OpCall, signature: Signature, parts: int) -> OpCall:
    """What runs once for each micro-batch, as rules see it; arguments may vary. See `micro_call`."""
    return _merged(node, _localized(call, signature, parts))


def reading(node: Call, micro: OpCall, reads: Sequence[Value]) -> Call:
    """`micro` in place of `node`, with the values that its operands are; the names of its outputs stay."""
    outputs = tuple(
        Value(old.name, spec.shape, spec.dtype) if old and spec else None
        for old, spec in zip(node.outputs, micro.results, strict=True)
    )
    names = [value.name for value in reads]
    args, kwargs = named_arguments(micro, names)
    call = replace(node, op=micro.op, args=args, kwargs=kwargs, outputs=outputs)
    return made_of(call, micro, names)


def _localized(call: OpCall, signature: Signature, parts: int) -> tuple[OpCall, ...]:
    """What each micro-batch runs; all of them are alike when the first and the last are."""
    ends = tuple(localize(call, signature, parts, m) for m in (0, parts - 1))
    if ends[0] == ends[1]:
        return ends
    return tuple(localize(call, signature, parts, m) for m in range(parts))


def _merged(node: Call, every: tuple[OpCall, ...]) -> OpCall:
    first = every[0]
    if any((one.op, one.results) != (first.op, first.results) for one in every):
        raise InternalError(
            f"{node.op} at {node.location}: its micro-batches are no calls of one op with results "
            "of one shape"
        )
    args = joined(tuple(one.args for one in every))
    kwargs = joined(tuple(one.kwargs for one in every))
    return replace(first, args=args, kwargs=kwargs)
