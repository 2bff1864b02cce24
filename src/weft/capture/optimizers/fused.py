"""Fused and foreach ops in the user's step, decomposed tensor by tensor.

They are element-wise, but name lists of parameters, gradients and states, each with a layout of its
own. The formulas are those of torch's kernels (`aten/src/ATen/native/cpu/Fused*Kernel.cpp`). An
optimizer that is given to `weft.compile` does not come here: it runs its own kernels on the shards.

Ops on lists of tensors run one tensor at a time, too: each then has a layout of its own, and none is gathered for the
sake of the others. A norm over all dimensions, as in clipping, is a reduction over the ranks and a root.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from weft.capture.fx.private import stands_for

aten = torch.ops.aten

_SLOW = torch._C.DispatchKey.CompositeExplicitAutograd


Tensors: TypeAlias = Sequence[Tensor]
# Of fused optimizers; and of norms.
TABLE: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
NORMS: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


@final
@dataclass(frozen=True, eq=False)
class _Scaling:
    """The additions of a gradient scaler: gradients are divided by `scale`; nothing is written where `found` is 1."""

    scale: Tensor | None
    found_inf: Tensor | None

    def gradient(self, gradient: Tensor, maximize: bool) -> Tensor:
        if self.scale is not None:
            self.write(gradient, gradient / self.scale)
        return -gradient if maximize else gradient

    def write(self, old: Tensor, new: Tensor) -> None:
        old.copy_(new if self.found_inf is None else torch.where(self.found_inf == 1, old, new))


def _adam(decoupled: bool) -> Callable[..., None]:
    """Adam, whose decay of weights goes by the gradient, or AdamW, where it is `decoupled` from it."""

    def run(
        self: Tensors,
        grads: Tensors,
        exp_avgs: Tensors,
        exp_avg_sqs: Tensors,
        max_exp_avg_sqs: Tensors,
        state_steps: Tensors,
        *,
        lr: float | Tensor,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        scaling = _Scaling(grad_scale, found_inf)
        for i, (parameter, first, second) in enumerate(
            zip(self, exp_avgs, exp_avg_sqs, strict=True)
        ):
            gradient = scaling.gradient(grads[i], maximize)
            decayed = parameter * (1 - lr * weight_decay) if decoupled else parameter
            gradient = gradient if decoupled else gradient + weight_decay * parameter
            scaling.write(first, beta1 * first + (1 - beta1) * gradient)
            scaling.write(second, beta2 * second + (1 - beta2) * gradient * gradient)
            if amsgrad:
                scaling.write(max_exp_avg_sqs[i], torch.maximum(max_exp_avg_sqs[i], second))
            largest = max_exp_avg_sqs[i] if amsgrad else second
            step = state_steps[i]
            root = (largest / (1 - beta2**step)).sqrt() + eps
            scaling.write(parameter, decayed - lr / (1 - beta1**step) * first / root)

    return run


for _name, _decoupled in (("adam", False), ("adamw", True)):
    stands_for(TABLE, f"_fused_{_name}_.default", f"_fused_{_name}_.tensor_lr")(_adam(_decoupled))


@stands_for(TABLE, "_fused_sgd_.default", "_fused_sgd_.tensor_lr")
def _sgd(
    self: Tensors,
    grads: Tensors,
    momentum_buffer_list: Tensors,
    *,
    weight_decay: float,
    momentum: float,
    lr: float | Tensor,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    scaling = _Scaling(grad_scale, found_inf)
    for i, parameter in enumerate(self):
        gradient = scaling.gradient(grads[i], maximize) + weight_decay * parameter
        if momentum:
            buffer = momentum_buffer_list[i]
            moved = momentum * buffer + (1 - dampening) * gradient
            scaling.write(buffer, gradient if is_first_step else moved)
            gradient = gradient + momentum * buffer if nesterov else buffer
        scaling.write(parameter, parameter - lr * gradient)


@stands_for(TABLE, "_fused_adagrad_.default", "_fused_adagrad_.tensor_lr")
def _adagrad(
    self: Tensors,
    grads: Tensors,
    state_sums: Tensors,
    state_steps: Tensors,
    *,
    lr: float | Tensor,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    scaling = _Scaling(grad_scale, found_inf)
    for parameter, grad, total, step in zip(self, grads, state_sums, state_steps, strict=True):
        gradient = scaling.gradient(grad, maximize) + weight_decay * parameter
        scaling.write(total, total + gradient * gradient)
        rate = lr / (1 + (step - 1) * lr_decay)
        scaling.write(parameter, parameter - rate * gradient / (total.sqrt() + eps))


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
