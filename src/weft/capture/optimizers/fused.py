"""Ops on lists of tensors, one tensor at a time; and norms over all dimensions, as in clipping, by sums.

Each tensor of a list has a layout of its own, and none is gathered for the sake of the others. A norm is a reduction
over the ranks and a root. The ops of fused optimizers update lists of parameters and states: eager ones by the parts of
ranks (`weft.tensor.dispatch.writes`), those that a step calls are refused. An optimizer that is given to
`weft.compile` does not come here: it runs its own kernels on the shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from weft.capture.fx.private import Refusal, stands_for

aten = torch.ops.aten

_SLOW = torch._C.DispatchKey.CompositeExplicitAutograd


# Of fused optimizers; and of norms.
TABLE: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
NORMS: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


def _refused(*_: Any, **__: Any) -> NoReturn:
    raise Refusal(
        "the step runs an op of a fused optimizer, which updates whole lists of tensors; expected plain tensor code or "
        "ops on lists (torch._foreach_add_ and the like) inside of a step: make the inner optimizer with fused=False"
    )


for _name in ("adam", "adamw", "sgd", "adagrad"):
    stands_for(TABLE, f"_fused_{_name}_.default", f"_fused_{_name}_.tensor_lr")(_refused)


def updates(op: Any) -> bool:
    """True for the op of a fused optimizer, which takes lists; others are named alike."""
    return op in TABLE


@cache
def foreach() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """For every `_foreach_*` op that has one, torch's own loop over the tensors."""
    every = sorted({schema.name for schema in torch._C._jit_get_all_schemas()})
    names = [name.removeprefix("aten::") for name in every if name.startswith("aten::_foreach_")]
    packets = (getattr(aten, name) for name in names if hasattr(aten, name))
    ops = (getattr(packet, overload) for packet in packets for overload in packet.overloads())
    return {op: partial(op._op_dk, _SLOW) for op in ops if op.has_kernel_for_dispatch_key(_SLOW)}


@stands_for(NORMS, "linalg_vector_norm.default")
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
    # Like torch's kernel does: sums of half precision in float32.
    exact = size if size.dtype == torch.float64 else size.float()
    return _POWERS[ord](exact, list(range(self.dim())), keepdim).to(size.dtype)


_POWERS: dict[float, Callable[[Tensor, list[int], bool], Tensor]] = {
    2: lambda size, dims, keepdim: (size * size).sum(dims, keepdim).sqrt(),
    1: lambda size, dims, keepdim: size.sum(dims, keepdim),
    math.inf: lambda size, dims, keepdim: size.amax(dims, keepdim),
    -math.inf: lambda size, dims, keepdim: size.amin(dims, keepdim),
}
