"""A step of an optimizer on tensors without data, watched: which ops mix elements, draw numbers, hold memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch.utils._pytree import tree_leaves

from weft.capture.fx.private import DispatchMode
from weft.capture.optimizers.kernels import HeldBytes

# Ops that move no value from one element to another, beside those that torch tags as pointwise.
_ELEMENTWISE = frozenset(
    (
        "_to_copy",
        "alias",
        "clone",
        "copy_",
        "detach",
        "empty",
        "empty_like",
        "fill_",
        "full_like",
        "lift_fresh",
        "ones_like",
        "view_as_complex",
        "view_as_real",
        "zero_",
        "zeros",
        "zeros_like",
    )
)


@final
class StepObserver(DispatchMode):  # type: ignore[no-untyped-call]
    """Notes which ops on more than one element mix elements, and what they hold.

    Where the optimizer takes a number out of a tensor, any will do to go on: what such a number says of
    a whole parameter, as its norm, an op has mixed before. Where it branches on one, the other branch
    could keep other states: that is refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mixing: list[str] = []
        self.draws: list[str] = []
        self.held = HeldBytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            if args[0].dtype == torch.bool:
                raise TypeError("the step branches on the value of a tensor")
            return 1.0
        result = func(*args, **(kwargs or {}))
        self.held.note(tree_leaves(result), tree_leaves((args, kwargs)))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws.append(str(func))
        mixes = not _is_elementwise(func) and not _fills_where(func, args)
        if mixes and any(_size(arg) > 1 for arg in args):
            self.mixing.append(str(func))
        return result


def _is_elementwise(op: Any) -> bool:
    return torch.Tag.pointwise in op.tags or op.overloadpacket.__name__ in _ELEMENTWISE


def _fills_where(op: Any, args: Sequence[Any]) -> bool:
    """True where this is `x[mask] = number`, with a mask of the shape of x."""
    if op.overloadpacket.__name__ not in ("index_put", "index_put_"):
        return False
    x, indices, value = args[:3]
    if len(indices) != 1 or indices[0] is None:
        return False
    mask = indices[0]
    return bool(mask.dtype == torch.bool and mask.shape == x.shape and value.numel() == 1)


def _size(arg: Any) -> int:
    if isinstance(arg, list | tuple):
        return max(map(_size, arg), default=0)
    return math.prod(arg.shape) if isinstance(arg, torch.Tensor) else 0
