"""One call of a graph, and what is known of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from weft.compiler.known_values import Known, Scalar, constant, value_of
from weft.ir.logical import Arg, Call, Ref, Value


@dataclass(frozen=True)
class Step:
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
        """What is known of a tensor or a number."""
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


Rule: TypeAlias = Callable[[Step], "Known | None"]
