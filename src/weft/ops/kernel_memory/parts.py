"""Sizes of which formulas of kernels' memory are made."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TypeAlias

from weft.ops.call import OpCall, TensorSpec
from weft.ops.cost import tensor_bytes
from weft.units import ITEM_SIZE

# Bytes that a call takes.
Formula: TypeAlias = Callable[[OpCall], int]
# Bytes of a few numbers: scalars on their way.
FEW = 64
INT = 8  # bytes of an index


def count(spec: TensorSpec) -> int:
    """The elements of a tensor."""
    return prod(spec.shape)


def item(spec: TensorSpec) -> int:
    """Bytes of an element."""
    return ITEM_SIZE.get(spec.dtype, 8)


def result(call: OpCall, number: int = 0) -> TensorSpec:
    """A result; one that is no tensor has no elements."""
    found = call.results[number] if number < len(call.results) else None
    return TensorSpec((0,), "uint8") if found is None else found


def made(call: OpCall) -> int:
    """Bytes of all results."""
    return sum(tensor_bytes(spec) for spec in call.results if spec is not None)


def few(call: OpCall) -> int:
    """A few numbers, whatever the operands."""
    return FEW
