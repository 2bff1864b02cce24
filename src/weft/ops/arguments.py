"""Reading and rewriting the argument trees of an `OpCall`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from weft.ops.call import OpCall, Operand, TensorSpec


def argument(call: OpCall, position: int, name: str = "", default: Any = None) -> Any:
    """The argument at `position`, or the keyword argument `name`, or `default`."""
    if position < len(call.args):
        return call.args[position]
    return dict(call.kwargs).get(name, default)


def operand_indices(tree: Any) -> Iterator[int]:
    """Numbers of the operands in an argument tree, in order; one that stands twice comes twice."""
    if isinstance(tree, Operand):
        yield tree.index
    elif isinstance(tree, tuple):
        for part in tree:
            yield from operand_indices(part)


def slots(call: OpCall) -> tuple[int, ...]:
    """The operand in each slot: every place of a tensor in `args`, then `kwargs`.

    `mul(x, x)` has one operand and two slots: a rule speaks about slots, as it cannot know that
    they are one tensor.
    """
    return tuple(operand_indices((call.args, tuple(value for _, value in call.kwargs))))


def slot_specs(call: OpCall) -> tuple[TensorSpec, ...]:
    """Shape and dtype of the tensor in each slot."""
    return tuple(call.operands[index] for index in slots(call))


def tensor_argument(call: OpCall, position: int) -> TensorSpec | None:
    """Shape and dtype of the tensor at `position`; None when no tensor is there."""
    value = argument(call, position)
    return call.operands[value.index] if isinstance(value, Operand) else None


def with_arguments(call: OpCall, changes: dict[int, Any]) -> OpCall:
    """`call` with other arguments at some positions."""
    args = tuple(changes.get(i, value) for i, value in enumerate(call.args))
    return replace(call, args=args)


def normal_dim(dim: int, rank: int) -> int:
    """`dim` counted from the front; tensors of rank 0 admit dimensions 0 and -1, as in torch."""
    return dim % max(rank, 1)


def normal_dims(dims: Any, rank: int) -> frozenset[int]:
    """The dimensions that a reduction's `dim` argument names: an int, some ints, or None or () for all."""
    if isinstance(dims, int):
        return frozenset((normal_dim(dims, rank),))
    return frozenset(normal_dim(dim, rank) for dim in dims or range(rank))
