"""From the graph's names to torch's objects: overloads, dtypes, devices, argument trees; and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from weft.errors import InternalError
from weft.ops.call import Operand, Token, map_argument


@cache
def torch_op(op: str) -> torch._ops.OpOverload[Any, Any]:
    """The torch overload called `op`, such as "aten.mm.default"."""
    found: Any = torch.ops
    try:
        for part in op.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise InternalError(
            f"torch {torch.__version__} has no op {op}; expected namespace.name.overload, such as "
            '"aten.mm.default"'
        ) from None
    if not isinstance(found, torch._ops.OpOverload):
        raise InternalError(f"{op} names no overload of a torch op, such as aten.mm.default")
    return found


def torch_value(token: Token) -> Any:
    """The torch object that a token names, such as `torch.float32` for `Token("dtype", "float32")`."""
    return torch.device(token.name) if token.kind == "device" else getattr(torch, token.name)


def token(value: Any) -> Any:
    """The token of a torch constant; any other value as it is."""
    if isinstance(value, torch.device):
        return Token("device", value.type)
    kinds = (
        (torch.dtype, "dtype"),
        (torch.layout, "layout"),
        (torch.memory_format, "memory_format"),
    )
    for kind, name in kinds:
        if isinstance(value, kind):
            return Token(name, str(value).removeprefix("torch."))
    return value


def to_torch(argument: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The argument tree with tensors in place of `Operand(i)` and torch's constants in place of tokens."""

    def leaf(value: Any) -> Any:
        if isinstance(value, Operand):
            return tensors[value.index]
        return torch_value(value) if isinstance(value, Token) else value

    return map_argument(leaf, argument)
