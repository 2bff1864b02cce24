"""The values that calls of a graph make without any input: each call as a function of known values.

Whatever an op or an argument is not listed for is unknown, and so is all that is made of it.
"""

from __future__ import annotations

from math import prod

import numpy as np

from weft.compiler.graph.known.moves import (
    KnownCall,
    Rule,
    concatenated,
    expanded,
    indexed,
    selected,
    sliced,
    summed,
    viewed,
)
from weft.compiler.graph.known.values import (
    Along,
    Band,
    Function,
    Known,
    Scalar,
    along,
    applied,
    band,
    both,
    compared,
    constant,
    is_exact,
    value_of,
)
from weft.ir.logical import Call, LogicalGraph, Ref


def known_values(graph: LogicalGraph) -> dict[str, Known]:
    """All values of a graph that follow from it alone, by name."""
    found: dict[str, Known] = {}
    for node in graph.nodes:
        if isinstance(node, Call) and node.op in _RULES and len(node.outputs) == 1:
            step = KnownCall(node, graph.values, found)
            made = _RULES[node.op](step) if prod(step.made.shape) else None
            if made is not None:
                found[step.made.name] = made
    return found


def _filled(position: int | None, value: Scalar = 0) -> Rule:
    """A factory of one value: that at a position of the arguments, or always the same."""

    def rule(step: KnownCall) -> Known | None:
        fill = value if position is None else step.arg(position)
        return constant(fill, step.made.dtype) if isinstance(fill, int | float) else None

    return rule


def _arange(step: KnownCall) -> Known | None:
    numbers = tuple(arg for arg in step.call.args if type(arg) is int)
    if step.made.dtype != "int64" or len(numbers) != len(step.call.args):
        return None
    return along(np.arange(*numbers, dtype=np.int64), -1)


def _exact_pair(step: KnownCall) -> tuple[Known, Known] | None:
    a, b = step.operand(0), step.operand(1)
    if a is None or b is None or step.call.kwargs or len(step.call.args) != 2:
        return None
    return (a, b) if is_exact(a) and is_exact(b) else None


def _arithmetic(function: Function) -> Rule:
    def rule(step: KnownCall) -> Known | None:
        pair = _exact_pair(step)
        if pair is None or step.made.dtype != "int64":
            return None
        return applied(lambda x, y: function(x.astype(np.int64), y.astype(np.int64)), *pair)

    return rule


def _comparison(op: str, function: Function) -> Rule:
    def rule(step: KnownCall) -> Known | None:
        pair = _exact_pair(step)
        if pair is None:
            return None
        a, b = pair
        found = compared(op, a, b) if isinstance(a, Along) and isinstance(b, Along) else None
        return found or applied(function, a, b)

    return rule


def _and(step: KnownCall) -> Known | None:
    pair = _exact_pair(step)
    return both(*pair) if pair is not None and _of_bools(step) else None


def _not(step: KnownCall) -> Known | None:
    x = step.operand()
    return applied(np.not_equal, x, Along(np.array([True]))) if x and _of_bools(step) else None


def _of_bools(step: KnownCall) -> bool:
    tensors = (step.values[arg.name] for arg in step.call.args if isinstance(arg, Ref))
    return all(value.dtype == "bool" for value in (step.made, *tensors))


def _where(step: KnownCall) -> Known | None:
    return _chosen(step, step.operand(0), step.operand(1), step.operand(2))


def _masked_fill(step: KnownCall) -> Known | None:
    return _chosen(step, step.operand(1), step.operand(2), step.operand(0))


def _chosen(
    step: KnownCall, mask: Known | None, yes: Known | None, no: Known | None
) -> Known | None:
    """One constant where a mask is true, another elsewhere."""
    first, second = step.as_made(value_of(yes)), step.as_made(value_of(no))
    if first is None or second is None:
        return None
    if isinstance(mask, Band):
        inside, outside = first if mask.inside else second, first if mask.outside else second
        return Band(mask.first, mask.last, mask.keys, inside, outside)
    chosen = value_of(mask)
    return None if chosen is None else constant(first if chosen else second, step.made.dtype)


def _triangle(upper: bool) -> Rule:
    def rule(step: KnownCall) -> Known | None:
        value, diagonal = value_of(step.operand()), step.number(1, 0)
        zero = step.as_made(0)
        if value is None or diagonal is None or zero is None:
            return None
        queries, keys = step.made.shape[-2:]
        edge, none = np.arange(queries) + diagonal, np.zeros(queries, dtype=np.int64)
        intervals = (edge, none + keys) if upper else (none, edge + 1)
        return band(*intervals, keys, value, zero)

    return rule


def _copied(step: KnownCall) -> Known | None:
    """The same elements, perhaps in another dtype."""
    x, dtype = step.operand(), step.made.dtype
    if isinstance(x, Band):
        inside, outside = step.as_made(x.inside), step.as_made(x.outside)
        if inside is None or outside is None:
            return None
        return Band(x.first, x.last, x.keys, inside, outside)
    if x is None or not x.axis:
        value = value_of(x)
        return None if value is None else constant(value, dtype)
    if dtype not in ("int64", "bool") or not is_exact(x):
        return None
    return Along(x.data.astype(np.int64 if dtype == "int64" else np.bool_), x.axis)


_RULES: dict[str, Rule] = {
    **{f"aten.arange.{name}": _arange for name in ("default", "start", "start_step")},
    **{f"aten.{name}.default": _filled(None, 0) for name in ("zeros", "zeros_like", "new_zeros")},
    **{f"aten.{name}.default": _filled(None, 1) for name in ("ones", "ones_like", "new_ones")},
    **{f"aten.{name}.default": _filled(1) for name in ("full", "full_like")},
    "aten.new_full.default": _filled(2),
    "aten.scalar_tensor.default": _filled(0),
    **{
        f"aten.{name}.{form}": _arithmetic(function)
        for name, function in (("add", np.add), ("sub", np.subtract), ("mul", np.multiply))
        for form in ("Tensor", "Scalar")
    },
    **{
        f"aten.{name}.{form}": _comparison(name, function)
        for name, function in (
            *(("le", np.less_equal), ("lt", np.less), ("ge", np.greater_equal)),
            *(("gt", np.greater), ("eq", np.equal), ("ne", np.not_equal)),
        )
        for form in ("Tensor", "Scalar")
    },
    **dict.fromkeys(("aten.bitwise_and.Tensor", "aten.logical_and.default"), _and),
    **dict.fromkeys(("aten.bitwise_not.default", "aten.logical_not.default"), _not),
    **{f"aten.where.{n}": _where for n in ("self", "Scalar", "ScalarSelf", "ScalarOther")},
    **{f"aten.masked_fill.{name}": _masked_fill for name in ("Scalar", "Tensor")},
    "aten.tril.default": _triangle(upper=False),
    "aten.triu.default": _triangle(upper=True),
    **{f"aten.{name}.default": viewed for name in ("view", "reshape", "_unsafe_view")},
    **{f"aten.squeeze.{name}": viewed for name in ("default", "dim", "dims")},
    "aten.unsqueeze.default": viewed,
    "aten.expand.default": expanded,
    **{f"aten.{n}.default": _copied for n in ("alias", "clone", "detach", "_to_copy")},
    "aten.slice.Tensor": sliced,
    "aten.select.int": selected,
    "aten.cat.default": concatenated,
    "aten.cumsum.default": summed,
    "aten.index.Tensor": indexed,
}
