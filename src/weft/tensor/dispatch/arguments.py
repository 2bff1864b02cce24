"""The arguments of a dispatched op: a key to remember decisions by, and the `OpCall` that the rules see.

Numbers that change from call to call, such as an optimizer's step size, must not make a new
decision each time. So for pointwise ops a float that is no whole number is a `FloatSlot`: the rules see
its value at the first call, kernels take it as an argument. Elsewhere, where shapes may depend on
it, a float belongs to the key.
"""

from __future__ import annotations

import math
from typing import Any, final

import torch
from torch import Tensor

from weft.ops import Operand
from weft.ops.call import Argument
from weft.runtime.torch_ops import token


@final
class FloatSlot(float):
    """A float that a kernel takes as argument number `index` of its floats."""

    index: int

    def __new__(cls, value: float, index: int) -> FloatSlot:
        slot = super().__new__(cls, value)
        slot.index = index
        return slot


@final
class Reader:
    """Reads arguments in order, collecting tensors and floats.

    Args:
        kind: the class of global tensors.
        slots: true where floats may be slots.
    """

    def __init__(self, kind: Any, slots: bool = False) -> None:
        self._kind = kind
        self._slots = slots
        self.tensors: list[Any] = []
        self.floats: list[float] = []
        # Whether plain tensors are among them, and such as are not strided.
        self.plain = self.sparse = False

    def key(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The key by which it is decided how an op with these arguments is run."""
        kind, found = self._kind, []
        for value in args:
            of = value.__class__
            if of is kind:
                self.tensors.append(value)
                found.append(value.spec)
            elif of is int or of is bool:
                found.append((of, value))
            elif of is float:
                found.append(self._float(value))
            elif value is None:
                found.append(None)
            else:
                found.append(self._other(value))
        return tuple(found)

    def _float(self, value: float) -> Any:
        if not self._is_slot(value):
            # By its text: 0.0 and -0.0 are equal, and nan differs from itself.
            return (float, str(value))
        self.floats.append(value)
        return value > 0

    def _is_slot(self, value: float) -> bool:
        return self._slots and math.isfinite(value) and not value.is_integer()

    def _other(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return self.key(tuple(value))
        if isinstance(value, Tensor):
            self.tensors.append(value)
            self.plain = True
            self.sparse = self.sparse or value.layout != torch.strided
            return (Tensor, value.dtype, value.shape, value.device.type)
        return value

    def argument(self, value: Any) -> Argument:
        """The same argument as the rules see it."""
        if isinstance(value, Tensor):
            self.tensors.append(value)
            return Operand(len(self.tensors) - 1)
        if isinstance(value, list | tuple):
            return tuple(self.argument(part) for part in value)
        if type(value) is float and self._is_slot(value):
            self.floats.append(value)
            return FloatSlot(value, len(self.floats) - 1)
        constant: Argument = token(value)
        return constant


def takes_slots(op: torch._ops.OpOverload[Any, Any]) -> bool:
    """True where the numbers among an op's arguments change nothing but values."""
    return torch.Tag.pointwise in op.tags


def op_name(op: torch._ops.OpOverload[Any, Any]) -> str:
    """The name that rules know an op by."""
    return str(op).removesuffix(".default") if op.namespace == "weft" else str(op)
