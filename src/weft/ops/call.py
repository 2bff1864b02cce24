"""One call of an op as the rules see it: argument tree with numbered operands, and the shapes of all tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias, final

from weft.cached import cached_property
from weft.layout import SBP


@final
@dataclass(frozen=True, slots=True)
class Token:
    """A constant of torch that the graph carries by name: `Token("dtype", "float32")`, `Token("device", "cpu")`.

    `kind` is one of "dtype", "device", "layout", "memory_format".
    """

    kind: str
    name: str


@final
@dataclass(frozen=True, slots=True)
class Operand:
    """The place of a tensor in an argument tree: operand number `index` of the call."""

    index: int


@final
@dataclass(frozen=True, slots=True)
class PerMicroBatch:
    """An argument that differs between micro-batches: `values[m]` in micro-batch `m`; holds no tensors."""

    values: tuple[Argument, ...]


# A node of an argument tree: an operand, a scalar, a constant of torch, or a tuple of arguments
# (lists become tuples).
Argument: TypeAlias = (
    "Operand | Token | PerMicroBatch | bool | int | float | complex | str | None"
    " | tuple[Argument, ...]"
)


@final
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor; `dtype` is torch's name without the prefix, such as "float32"."""

    shape: tuple[int, ...]
    dtype: str


@final
@dataclass(frozen=True)
class OpCall:
    """One call of the op `op`, such as "aten.mm.default".

    `operands` are the tensors in the order of their first appearance in `args`, then `kwargs`; the
    trees hold `Operand(i)` in their place. `results` has one entry for each output; an output that
    is not a tensor (None) is None.
    """

    op: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...]
    operands: tuple[TensorSpec, ...]
    results: tuple[TensorSpec | None, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Calls are looked up all the time, and their argument trees are deep."""
        return hash((self.op, self.args, self.kwargs, self.operands, self.results))

    @cached_property
    def varyings(self) -> tuple[PerMicroBatch, ...]:
        """The arguments that differ between micro-batches, in order."""
        return tuple(_varyings((self.args, *(arg for _, arg in self.kwargs))))

    def at(self, micro: int) -> OpCall:
        """The call in one micro-batch."""
        if not self.varyings:
            return self

        def leaf(arg: Any) -> Any:
            return arg.values[micro] if isinstance(arg, PerMicroBatch) else arg

        kwargs = tuple([(key, map_argument(leaf, arg)) for key, arg in self.kwargs])
        return replace(self, args=map_argument(leaf, self.args), kwargs=kwargs)


@final
@dataclass(frozen=True)
class Signature:
    """One legal combination of SBPs of an op along one axis of a grid.

    `results` has one entry for each output of the call (Broadcast for outputs that are not tensors).
    """

    operands: tuple[SBP, ...]
    results: tuple[SBP, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.operands, self.results))

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.operands))} -> {', '.join(map(str, self.results))}"


@lru_cache(maxsize=1024)
def operand(index: int) -> Operand:
    """The operand of a number: one object, which equals itself at once. Calls are compared all the time."""
    return Operand(index)


@lru_cache(maxsize=65536)
def tensor_spec(shape: tuple[int, ...], dtype: str) -> TensorSpec:
    """The spec of a shape and a dtype: one object, as those of `operand`."""
    return TensorSpec(shape, dtype)


def _varyings(argument: Any) -> Iterator[PerMicroBatch]:
    if isinstance(argument, PerMicroBatch):
        yield argument
    elif isinstance(argument, tuple):
        for part in argument:
            yield from _varyings(part)


def map_argument(function: Callable[[Any], Any], argument: Any) -> Any:
    """Apply `function` to every leaf of an argument tree, keeping the tuples."""
    if isinstance(argument, tuple):
        return tuple([map_argument(function, part) for part in argument])
    return function(argument)


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
