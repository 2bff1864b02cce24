"""The values that calls of a graph make without any input: each call as a function of known values.

Results of ops or arguments that are not listed are unknown, and so is everything computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeAlias, final

import numpy as np

from weft.compiler.graph.constant_folding.folded_values import (
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
from weft.ir.logical import Arg, Call, LogicalGraph, Ref, Value


@final
@dataclass(frozen=True)
class FoldedCall:
    """A call with the folded constants before it."""

    call: Call
    values: Mapping[str, Value]
    known: Mapping[str, Known]

    @property
    def made(self) -> Value:
        (value,) = self.call.outputs
        assert value is not None  # of an op with one result
        return value

    def arg(self, position: int, default: Arg = None) -> Arg:
        return self.call.args[position] if position < len(self.call.args) else default

    def number(self, position: int, default: int | None = None) -> int | None:
        """An argument that is an integer."""
        found = self.arg(position, default)
        return found if isinstance(found, int) else None

    def shape(self, position: int = 0) -> tuple[int, ...]:
        """The shape of an argument that is a tensor."""
        found = self.arg(position)
        return self.values[found.name].shape if isinstance(found, Ref) else ()

    def operand(self, position: int = 0) -> Known | None:
        """An argument, tensor or number."""
        return self.of(self.arg(position))

    def of(self, arg: Arg) -> Known | None:
        """The known value of a tensor or a number."""
        match arg:
            case Ref(name=name):
                return self.known.get(name)
            case bool():
                return constant(arg, "bool")
            case int():
                return constant(arg, "int64")
            case float():
                return constant(arg, "float64")
        return None

    def dim(self, position: int, shape: tuple[int, ...], default: int | None = None) -> int | None:
        """An argument that names a dimension, counted from the end."""
        found = self.number(position, default)
        return None if found is None or not shape else found % len(shape) - len(shape)

    def as_made(self, value: Scalar | None) -> Scalar | None:
        """A number in the dtype of the result."""
        return None if value is None else value_of(constant(value, self.made.dtype))


Rule: TypeAlias = Callable[[FoldedCall], "Known | None"]


def viewed(step: FoldedCall) -> Known | None:
    """The same elements in the same order in another shape."""
    x, shape, made = step.operand(), step.shape(), step.made.shape
    if isinstance(x, Band):
        return x if made[-2:] == shape[-2:] and len(made) > 1 else None
    if x is None or not x.axis:
        return x
    behind = prod(_after(shape, x.axis))
    for axis in range(-len(made), 0):
        if made[axis] == x.data.size and prod(_after(made, axis)) == behind:
            return Along(x.data, axis)
    return None


def _after(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[len(shape) + axis + 1 :]


def expanded(step: FoldedCall) -> Known | None:
    """The tensor expanded along dimensions of size 1 and new dimensions."""
    x, shape, made = step.operand(), step.shape(), step.made.shape
    return x if not isinstance(x, Band) or made[-2:] == shape[-2:] else None


def sliced(step: FoldedCall) -> Known | None:
    """A range of a dimension; of the queries and keys of a band only the whole."""
    x, shape = step.operand(), step.shape()
    dim = step.dim(1, shape, 0)
    if step.made.shape == shape and step.number(4, 1) == 1:
        return x
    if isinstance(x, Band):
        return x if dim is not None and dim < -2 else None
    if x is None or x.axis != dim:
        return x if dim is not None else None
    start, end, stride = step.arg(2), step.arg(3), step.arg(4, 1)
    if not all(part is None or isinstance(part, int) for part in (start, end, stride)):
        return None
    return along(x.data[slice(start, end, stride)], x.axis)


def selected(step: FoldedCall) -> Known | None:
    """One position of a dimension, which goes."""
    x, index = step.operand(), step.number(2)
    dim = step.dim(1, step.shape())
    if x is None or dim is None or index is None:
        return None
    if isinstance(x, Band):
        return x if dim < -2 else None
    if x.axis == dim:
        return Along(x.data[index : index + 1 or None])
    return Along(x.data, x.axis + 1 if x.axis < dim else x.axis)


def concatenated(step: FoldedCall) -> Known | None:
    """Tensors one after the other, along the dimension in which they vary."""
    refs, dim = step.arg(0), step.dim(1, step.made.shape, 0)
    parts = []
    for ref in refs if isinstance(refs, tuple) else ():
        x = step.of(ref)
        if dim is None or not isinstance(ref, Ref) or not isinstance(x, Along):
            return None
        if x.axis not in (0, dim):
            return None
        parts.append(np.broadcast_to(x.data, (step.values[ref.name].shape[dim],)))
    if dim is None or len({part.dtype for part in parts}) != 1:
        return None
    return along(np.concatenate(parts), dim)


def summed(step: FoldedCall) -> Known | None:
    """Sums of the elements so far."""
    x, dim = step.operand(), step.dim(1, step.shape())
    if not isinstance(x, Along) or dim is None or x.axis not in (0, dim) or not is_exact(x):
        return None
    size = step.shape()[dim]
    each = np.broadcast_to(x.data, (size,)).astype(np.int64)
    return along(np.cumsum(each), dim) if step.made.dtype == "int64" else None


def indexed(step: FoldedCall) -> Known | None:
    """`x[i, j, …]` with an index for every dimension: that of the one along which `x` varies counts."""
    x, indices, shape = step.operand(), step.arg(1), step.shape()
    if not isinstance(x, Along) or not isinstance(indices, tuple) or len(indices) != len(shape):
        return None
    found = [step.of(index) for index in indices if isinstance(index, Ref)]
    integers = [i for i in found if isinstance(i, Along) and i.data.dtype.kind == "i"]
    if len(integers) != len(shape):
        return None
    if not x.axis:
        return x
    index = integers[x.axis]
    inside = (index.data >= -x.data.size) & (index.data < x.data.size)
    return Along(x.data[index.data], index.axis) if inside.all() else None


def fold_constants(graph: LogicalGraph) -> dict[str, Known]:
    """All values of a graph that follow from it alone, by name."""
    found: dict[str, Known] = {}
    for node in graph.nodes:
        if isinstance(node, Call) and node.op in _RULES and len(node.outputs) == 1:
            step = FoldedCall(node, graph.values, found)
            made = _RULES[node.op](step) if prod(step.made.shape) else None
            if made is not None:
                found[step.made.name] = made
    return found


def _filled(position: int | None, value: Scalar = 0) -> Rule:
    """A factory of one value: that at a position of the arguments, or always the same."""

    def rule(step: FoldedCall) -> Known | None:
        fill = value if position is None else step.arg(position)
        return constant(fill, step.made.dtype) if isinstance(fill, int | float) else None

    return rule


def _arange(step: FoldedCall) -> Known | None:
    numbers = tuple(arg for arg in step.call.args if type(arg) is int)
    if step.made.dtype != "int64" or len(numbers) != len(step.call.args):
        return None
    return along(np.arange(*numbers, dtype=np.int64), -1)


def _exact_pair(step: FoldedCall) -> tuple[Known, Known] | None:
    a, b = step.operand(0), step.operand(1)
    if a is None or b is None or step.call.kwargs or len(step.call.args) != 2:
        return None
    return (a, b) if is_exact(a) and is_exact(b) else None


def _arithmetic(function: Function) -> Rule:
    def rule(step: FoldedCall) -> Known | None:
        pair = _exact_pair(step)
        if pair is None or step.made.dtype != "int64":
            return None
        return applied(lambda x, y: function(x.astype(np.int64), y.astype(np.int64)), *pair)

    return rule


def _comparison(op: str, function: Function) -> Rule:
    def rule(step: FoldedCall) -> Known | None:
        pair = _exact_pair(step)
        if pair is None:
            return None
        a, b = pair
        found = compared(op, a, b) if isinstance(a, Along) and isinstance(b, Along) else None
        return found or applied(function, a, b)

    return rule


def _and(step: FoldedCall) -> Known | None:
    pair = _exact_pair(step)
    return both(*pair) if pair is not None and _of_bools(step) else None


def _not(step: FoldedCall) -> Known | None:
    x = step.operand()
    return applied(np.not_equal, x, Along(np.array([True]))) if x and _of_bools(step) else None


def _of_bools(step: FoldedCall) -> bool:
    tensors = (step.values[arg.name] for arg in step.call.args if isinstance(arg, Ref))
    return all(value.dtype == "bool" for value in (step.made, *tensors))


def _where(step: FoldedCall) -> Known | None:
    return _chosen(step, step.operand(0), step.operand(1), step.operand(2))


def _masked_fill(step: FoldedCall) -> Known | None:
    return _chosen(step, step.operand(1), step.operand(2), step.operand(0))


def _chosen(
    step: FoldedCall, mask: Known | None, yes: Known | None, no: Known | None
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
    def rule(step: FoldedCall) -> Known | None:
        value, diagonal = value_of(step.operand()), step.number(1, 0)
        zero = step.as_made(0)
        if value is None or diagonal is None or zero is None:
            return None
        queries, keys = step.made.shape[-2:]
        edge, none = np.arange(queries) + diagonal, np.zeros(queries, dtype=np.int64)
        intervals = (edge, none + keys) if upper else (none, edge + 1)
        return band(*intervals, keys, value, zero)

    return rule


def _copied(step: FoldedCall) -> Known | None:
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
