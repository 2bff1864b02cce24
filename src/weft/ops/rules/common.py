"""Factors that many ops share."""

from __future__ import annotations

from typing import Any

from weft.ops.call import OpCall, TensorSpec, slot_specs
from weft.ops.cost import is_integer
from weft.ops.factors import WHOLE, Dims, Factors
from weft.ops.rule import Groups

FIRST = ((0,),)  # linear (or monotone) in the first argument
EITHER = ((0,), (1,))  # in the first and in the second, one at a time
TOGETHER = ((0, 1),)  # in the first two together


def no_work(call: OpCall) -> int:
    """No flops, or no bytes."""
    return 0


def of_floats(call: OpCall) -> Groups:
    """Linear in the first argument, but for integers, whose results are rounded: sums do not pass that."""
    result = call.results[0]
    return FIRST if result and not is_integer(result.dtype) else ()


def numbered(rank: int) -> Dims:
    """A factor for each dimension of a tensor."""
    return tuple(f"d{i}" for i in range(rank))


def shape_of(spec: TensorSpec | None) -> tuple[int, ...]:
    """The shape; that of a scalar for a result that is not a tensor."""
    return spec.shape if spec else ()


def aligned(shape: tuple[int, ...], whole: tuple[int, ...]) -> Dims:
    """The factors of a tensor of `shape` that broadcasts to `whole`, whose factors are `numbered`."""
    shift = len(whole) - len(shape)
    return tuple(
        f"d{i + shift}" if i + shift >= 0 and size == whole[i + shift] else WHOLE
        for i, size in enumerate(shape)
    )


def pointwise(call: OpCall) -> Factors:
    """Every dimension of the first result is a factor; all tensors broadcast to it."""
    whole = shape_of(call.results[0])
    return Factors(
        tuple(aligned(spec.shape, whole) for spec in slot_specs(call)),
        tuple(aligned(shape_of(spec), whole) for spec in call.results),
    )


def like_first(call: OpCall) -> Factors:
    """Every dimension of the first operand is a factor; all other tensors broadcast to it."""
    whole = slot_specs(call)[0].shape
    return Factors(
        tuple(aligned(spec.shape, whole) for spec in slot_specs(call)),
        tuple(aligned(shape_of(spec), whole) for spec in call.results),
    )


def except_dims(rank: int, dims: frozenset[int] | set[int]) -> Dims:
    """`numbered`, with some dimensions whole."""
    return tuple(WHOLE if i in dims else f"d{i}" for i in range(rank))


def without_dims(rank: int, dims: frozenset[int] | set[int]) -> Dims:
    """`numbered`, with some dimensions left out."""
    return tuple(f"d{i}" for i in range(rank) if i not in dims)


def spread(value: Any, count: int) -> tuple[int, ...]:
    """A number for each of `count` dimensions of space: torch takes one number, or a list of one, for all of them."""
    numbers = value if isinstance(value, tuple) else (value,)
    return tuple(numbers * count if len(numbers) == 1 else numbers)


def channels(shape: tuple[int, ...], channel: str = "c") -> Dims:
    """Factors of (batch, channel, positions ...), or of a vector of channels."""
    if len(shape) < 2:
        return (channel,) * len(shape)
    return ("n", channel, *(f"s{i}" for i in range(len(shape) - 2)))
