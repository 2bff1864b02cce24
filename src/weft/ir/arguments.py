"""The `OpCall` of a node, its operands by name, and its arguments as text shows them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar, final

from weft.cached import cached_property
from weft.errors import InternalError
from weft.ops.call import (
    OpCall,
    Operand,
    TensorSpec,
    Token,
    map_argument,
    operand,
    slots,
    tensor_spec,
)
from weft.ops.call import PerMicroBatch as PerMicroBatch
from weft.units import ITEM_SIZE, Bytes


@final
@dataclass(frozen=True, slots=True)
class Ref:
    """A use of the value called `name`; `spec` is the value's, where a call is made of it."""

    name: str
    spec: TensorSpec | None = field(default=None, compare=False, repr=False)


# A node of an argument tree: like `weft.ops.call.Argument`, with `Ref` in place of numbered
# operands.
Arg: TypeAlias = (
    "Ref | Token | PerMicroBatch | bool | int | float | complex | str | None | tuple[Arg, ...]"
)


class Specified:
    """A value, whole or local: its name, shape and dtype."""

    __slots__ = ()

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype."""
        return tensor_spec(self.shape, self.dtype)

    @property
    def ref(self) -> Ref:
        """An argument that is the value."""
        return Ref(self.name, self.spec)

    @property
    def nbytes(self) -> Bytes:
        """Size of the tensor."""
        return Bytes(math.prod(self.shape) * ITEM_SIZE[self.dtype])


_AnyCall = TypeVar("_AnyCall", bound="Called")


class Called:
    """A call, of the graph or of one rank: its `OpCall`, and the names of its operands.

    Attributes:
        call: the call on tensors, as the rules of ops see it.
        operands: the names of the distinct values that it reads; operand `i` of `call` is name number `i`.
    """

    call: OpCall
    operands: tuple[str, ...]
    outputs: tuple[Any, ...]

    @property
    def op(self) -> str:
        """The name of the op, such as "aten.mm.default"."""
        return self.call.op

    @cached_property
    def args(self) -> tuple[Arg, ...]:
        """The arguments, with names of values."""
        args: tuple[Arg, ...] = map_argument(self._named, self.call.args)
        return args

    @cached_property
    def kwargs(self) -> tuple[tuple[str, Arg], ...]:
        """The keyword arguments, with names of values."""
        return tuple([(key, map_argument(self._named, arg)) for key, arg in self.call.kwargs])

    @cached_property
    def uses(self) -> tuple[str, ...]:
        """The names of the values that the call reads, in order, repeated as they stand."""
        return tuple([self.operands[index] for index in slots(self.call)])

    @cached_property
    def first(self) -> OpCall:
        """The call in the first micro-batch."""
        return self.call.at(0)

    @property
    def varyings(self) -> tuple[PerMicroBatch, ...]:
        """The arguments that differ between micro-batches, in order."""
        return self.call.varyings

    def changed(self: _AnyCall, **fields: Any) -> _AnyCall:
        """The call with other fields; among them may be `op`, `args` and `kwargs`, with names."""
        if not fields.keys().isdisjoint(("op", "args", "kwargs")):
            op, args, kwargs = (fields.pop(x, getattr(self, x)) for x in ("op", "args", "kwargs"))
            outputs = fields.get("outputs", self.outputs)
            fields["call"], fields["operands"] = numbered(op, args, kwargs, outputs)
        elif "outputs" in fields:
            results = tuple([value and value.spec for value in fields["outputs"]])
            if results != self.call.results:
                fields["call"] = replace(self.call, results=results)
        copy: _AnyCall = replace(self, **fields)  # type: ignore[type-var]
        return copy

    def on(self: _AnyCall, *values: Specified) -> _AnyCall:
        """The call on other values, of which each is a value of its own; their shapes may be others."""
        call = replace(self.call, operands=tuple([value.spec for value in values]))
        copy: _AnyCall = replace(  # type: ignore[type-var]
            self, call=call, operands=tuple([value.name for value in values])
        )
        return copy

    def _named(self, leaf: Any) -> Any:
        if not isinstance(leaf, Operand):
            return leaf
        return Ref(self.operands[leaf.index], self.call.operands[leaf.index])


def numbered(
    op: str,
    args: tuple[Arg, ...],
    kwargs: tuple[tuple[str, Arg], ...],
    outputs: tuple[Specified | None, ...],
) -> tuple[OpCall, tuple[str, ...]]:
    """A call of arguments with names, and the names of its operands."""
    specs: dict[str, TensorSpec] = {}
    numbers: dict[str, Operand] = {}

    def leaf(arg: Any) -> Any:
        if not isinstance(arg, Ref):
            return arg
        if arg.name not in numbers:
            if arg.spec is None:
                raise InternalError(f"{op} reads %{arg.name}, whose shape is not known")
            specs[arg.name] = arg.spec
            numbers[arg.name] = operand(len(numbers))
        return numbers[arg.name]

    of_args = map_argument(leaf, args)
    of_kwargs = tuple([(key, map_argument(leaf, arg)) for key, arg in kwargs])
    results = tuple([None if value is None else value.spec for value in outputs])
    return OpCall(op, of_args, of_kwargs, tuple(specs.values()), results), tuple(specs)


def with_names(call: _AnyCall, names: Mapping[str, str]) -> _AnyCall:
    """The call with its operands renamed to values of the same shapes and dtypes. It may be the same one."""
    if names.keys().isdisjoint(call.operands):
        return call
    new = [names.get(name, name) for name in call.operands]
    copy: _AnyCall = replace(call, **applied(call.call, new))  # type: ignore[type-var]
    return copy


def applied(call: OpCall, names: Sequence[str]) -> dict[str, Any]:
    """The fields `call` and `operands` of a call on values of these names, of which two may be the same one."""
    if len({*names}) == len(names):
        return {"call": call, "operands": tuple(names)}

    def leaf(arg: Any) -> Any:
        known = isinstance(arg, Operand)
        return Ref(names[arg.index], call.operands[arg.index]) if known else arg

    kwargs = tuple([(key, map_argument(leaf, arg)) for key, arg in call.kwargs])
    made, operands = numbered(call.op, map_argument(leaf, call.args), kwargs, ())
    return {"call": replace(made, results=call.results), "operands": operands}


def refs(arg: Any) -> Iterator[str]:
    """The names of all values in an argument tree, in order."""
    if isinstance(arg, Ref):
        yield arg.name
    elif isinstance(arg, tuple):
        for part in arg:
            yield from refs(part)
