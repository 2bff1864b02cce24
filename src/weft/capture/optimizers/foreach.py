"""Ops on lists of tensors, one tensor at a time; norms of whole tensors, as they stand in clipping.

Each tensor of a list then has a layout of its own, and none is gathered for the sake of the others.
A norm over all dimensions is a reduction over the ranks and a root.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_SLOW = torch._C.DispatchKey.CompositeExplicitAutograd


@cache
def foreach() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """For every `_foreach_*` that has one: torch's own loop over the tensors."""
    packets = (getattr(aten, name) for name in _names() if hasattr(aten, name))
    ops = (getattr(packet, overload) for packet in packets for overload in packet.overloads())
    return {op: _looped(op) for op in ops if op.has_kernel_for_dispatch_key(_SLOW)}


def _names() -> list[str]:
    every = {schema.name for schema in torch._C._jit_get_all_schemas()}
    return sorted(
        name.removeprefix("aten::") for name in every if name.startswith("aten::_foreach_")
    )


def _looped(op: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        return op._op_dk(_SLOW, *args, **kwargs)

    return run


def _vector_norm(
    self: Tensor,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """The norm of a whole tensor by a sum or an extremum; NotImplemented for others."""
    dims = range(self.dim()) if dim is None else dim
    if len(dims) < self.dim() or not self.dim() or ord not in _POWERS or 0 in self.shape:
        return NotImplemented
    x = self if dtype is None else self.to(dtype)
    size = x if ord == 2 and not x.is_complex() else x.abs()
    # As torch's kernel does: sums of half precision in float32.
    exact = size if size.dtype == torch.float64 else size.float()
    return _POWERS[ord](exact, list(range(self.dim())), keepdim).to(size.dtype)


_POWERS: dict[float, Callable[[Tensor, list[int], bool], Tensor]] = {
    2: lambda size, dims, keepdim: (size * size).sum(dims, keepdim).sqrt(),
    1: lambda size, dims, keepdim: size.sum(dims, keepdim),
    math.inf: lambda size, dims, keepdim: size.amax(dims, keepdim),
    -math.inf: lambda size, dims, keepdim: size.amin(dims, keepdim),
}

TABLE: dict[str, Callable[..., Any]] = {"linalg_vector_norm.default": _vector_norm}
