"""Known values in another shape: views, parts, joined parts, and sums along a dimension."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeAlias, final

import numpy as np

from weft.compiler.graph.known.values import (
    Along,
    Band,
    Known,
    Scalar,
    along,
    constant,
    is_exact,
    value_of,
)
from weft.ir.logical import Arg, Call, Ref, Value


@final
@dataclass(frozen=True)
class KnownCall:
    """One call, and what is known before it."""

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


Rule: TypeAlias = Callable[[KnownCall], "Known | None"]


def viewed(step: KnownCall) -> Known | None:
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
    """The dimensions behind one that is counted from the end."""
    return shape[len(shape) + axis + 1 :]


def expanded(step: KnownCall) -> Known | None:
    """The same elements, repeated along dimensions of size 1 and new ones."""
    x, shape, made = step.operand(), step.shape(), step.made.shape
    return x if not isinstance(x, Band) or made[-2:] == shape[-2:] else None


def sliced(step: KnownCall) -> Known | None:
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


def selected(step: KnownCall) -> Known | None:
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


def concatenated(step: KnownCall) -> Known | None:
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


def summed(step: KnownCall) -> Known | None:
    """Sums of the elements so far."""
    x, dim = step.operand(), step.dim(1, step.shape())
    if not isinstance(x, Along) or dim is None or x.axis not in (0, dim) or not is_exact(x):
        return None
    size = step.shape()[dim]
    each = np.broadcast_to(x.data, (size,)).astype(np.int64)
    return along(np.cumsum(each), dim) if step.made.dtype == "int64" else None


def indexed(step: KnownCall) -> Known | None:
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
