"""Symbolic forms of tensors that a graph alone determines: vectors and bands.

Two forms are enough for the masks of attention, and neither holds a tensor of (queries, keys):

- `Along`: a tensor that varies along one dimension only, such as positions; computed exactly.
- `Band`: what a comparison of a row with a column of positions makes: in each row one value at the keys
  of an interval, another at all others. A causal mask is `[0, q]`, a sliding window `[q - w + 1, q]`.

Integers and booleans are computed with; floats are only passed on, so that no rounding matters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

Data: TypeAlias = npt.NDArray[Any]
Scalar: TypeAlias = "bool | int | float"
# Of numpy, on arrays of equal or broadcast shapes.
Function: TypeAlias = Callable[..., Data]

_FLIPPED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq", "ne": "ne"}


@final
@dataclass(frozen=True, eq=False)
class Along:
    """A tensor that varies along one dimension.

    Attributes:
        data: [n], of int64, bool, or float64 for any dtype of floats.
        axis: that dimension, counted from the end (-1 is the last); 0 for constants, where n is 1.
    """

    data: Data
    axis: int = 0


@final
@dataclass(frozen=True, eq=False)
class Band:
    """A tensor [..., queries, keys]: `inside` where first[q] ≤ k < last[q], else `outside`.

    Attributes:
        first: [queries], int64.
        last: [queries], int64, nowhere below `first`.
    """

    first: Data
    last: Data
    keys: int
    inside: Scalar
    outside: Scalar


Known: TypeAlias = "Along | Band"


def along(data: Data, axis: int) -> Along:
    """A vector along a dimension, or a constant."""
    return Along(data, axis if data.size > 1 else 0)


def constant(value: Scalar, dtype: str) -> Along | None:
    """A tensor of one value; None if the value changes with its dtype, or the dtype is not computed with."""
    if dtype == "bool" and isinstance(value, int):
        return Along(np.array([bool(value)]))
    if dtype == "int64" and isinstance(value, int) and -(2**63) <= value < 2**63:
        return Along(np.array([value], dtype=np.int64))
    if dtype in ("float16", "bfloat16", "float32", "float64"):
        return Along(np.array([value], dtype=np.float64))
    return None


def band(first: Data, last: Data, keys: int, inside: Scalar, outside: Scalar) -> Band:
    """A band whose intervals are cut to the keys."""
    first = np.clip(first, 0, keys)
    return Band(first, np.maximum(np.clip(last, 0, keys), first), keys, inside, outside)


def value_of(known: Known | None) -> Scalar | None:
    """The value of a constant; None for others."""
    if isinstance(known, Along) and not known.axis:
        found: Scalar = known.data[0].item()
        return found
    return None


def is_exact(known: Known) -> bool:
    """True if the elements are integers or booleans."""
    if isinstance(known, Along):
        return known.data.dtype.kind in "ib"
    return isinstance(known.inside, int) and isinstance(known.outside, int)


def applied(function: Function, a: Known, b: Known) -> Known | None:
    """A function of the elements of two tensors; None if the result is neither form."""
    if isinstance(a, Along) and isinstance(b, Along):
        if a.axis and b.axis and a.axis != b.axis:
            return None
        return Along(function(a.data, b.data), a.axis or b.axis)
    one = a if isinstance(a, Band) else b
    assert isinstance(one, Band)  # at least one is
    inner, outer = _pair(a, one), _pair(b, one)
    if inner is None or outer is None:
        return None
    inside, outside = (
        function(np.array([x]), np.array([y])) for x, y in zip(inner, outer, strict=True)
    )
    return Band(one.first, one.last, one.keys, inside[0].item(), outside[0].item())


def _pair(known: Known, like: Band) -> tuple[Scalar, Scalar] | None:
    if isinstance(known, Along):
        value = value_of(known)
        return None if value is None else (value, value)
    same = known.keys == like.keys and np.array_equal(known.first, like.first)
    return (known.inside, known.outside) if same and np.array_equal(known.last, like.last) else None


def compared(op: str, a: Along, b: Along) -> Band | None:
    """A row compared with a column (`op` is le, lt, ge, gt, eq or ne), where the row is sorted."""
    if {a.axis, b.axis} != {-1, -2}:
        return None
    if a.axis == -2:
        return compared(_FLIPPED[op], b, a)
    row, column = a.data.astype(np.int64), b.data.astype(np.int64)
    if (row[1:] < row[:-1]).any():
        return None
    below, through = np.searchsorted(row, column, "left"), np.searchsorted(row, column, "right")
    none, every = np.zeros_like(below), np.full_like(below, row.size)
    first = {"le": none, "lt": none, "ge": below, "gt": through}.get(op, below)
    last = {"le": through, "lt": below, "ge": every, "gt": every}.get(op, through)
    return Band(first, last, row.size, op != "ne", op == "ne")


def both(a: Known, b: Known) -> Known | None:
    """`a and b`, of booleans."""
    if isinstance(a, Band) and isinstance(b, Band):
        x, y = kept_keys(a, bool), kept_keys(b, bool)
        if x is None or y is None or a.keys != b.keys or x[0].size != y[0].size:
            return None
        return band(np.maximum(x[0], y[0]), np.minimum(x[1], y[1]), a.keys, True, False)
    return applied(np.logical_and, a, b)


def kept_keys(known: Band, kept: Callable[[Scalar], bool | None]) -> tuple[Data, Data] | None:
    """The intervals [first, last) of the keys of each query that are kept.

    Args:
        kept: true if an element keeps its key; None if it neither keeps nor drops it.

    Returns:
        Two int64 arrays of [queries]; None if what is kept is not an interval.
    """
    inside, outside = kept(known.inside), kept(known.outside)
    first, last = known.first, known.last
    none, every = np.zeros_like(first), np.full_like(first, known.keys)
    if inside is None or outside is None:
        return None
    if inside == outside:
        return none, every if inside else none
    if inside:
        return first, last
    if (first == 0).all():
        return last, every
    return (none, first) if (last == known.keys).all() else None
