"""Kernels of the ops that passes put into a graph (`weft.ops.rules.own_ops`, `weft.ops.rules.own_ops`).

Ops of `OVER_STEP` make one value of all micro-batches of a step, and keep it between acts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor

from weft.runtime.channels.channel import COMBINE, SIGNED, reduce_in_order
from weft.runtime.kernels.dense_operands import SUMMED_PRODUCT, SumOfProducts
from weft.runtime.memory.copies import from_host, to_host
from weft.runtime.memory.memory_meter import note_host

_HALF = (torch.float16, torch.bfloat16)


def square_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`weft.square_sum`: the sum of the squares of all elements in `dtype`, shape `[]`."""
    # Torch's norm makes no tensor of squares, and sums halves in float32.
    exact = torch.float32 if x.dtype in _HALF else None
    norm: Tensor = torch.linalg.vector_norm(x, dtype=exact)
    return norm.square().to(dtype)


def nonfinite(x: Tensor) -> Tensor:
    """`weft.nonfinite`: 1.0 when an element of `x` is infinite or not a number, else 0.0; float32."""
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    # Least and largest number tell, and take no tensor of the size of `x`.
    return (~torch.isfinite(torch.stack(torch.aminmax(x))).all()).float()


def scale(x: Tensor, factor: Tensor) -> Tensor:
    """`weft.scale`: `x` times the number `factor`, in the dtype of `x`."""
    return x * factor.to(x.dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`weft.cast_parts`, `weft.cast_whole`: `x` in `dtype`."""
    return x.to(dtype)


def clip_factor(square: Tensor, max_norm: float) -> Tensor:
    """`weft.clip_factor`: what gradients with `square` as sum of squares are multiplied by.

    The formula of `torch.nn.utils.clip_grad_norm_`.
    """
    return torch.clamp(max_norm / (square.sqrt() + 1e-6), max=1.0)


def next_scale(scale: Tensor, tracker: Tensor, overflow: Tensor) -> tuple[Tensor, Tensor]:
    """`weft.next_scale`: the loss scale after a step, and for how many steps it has stood.

    Halved on overflow, doubled after 2000 steps without: the numbers of `torch.amp.GradScaler`.
    """
    scale, tracker = scale.clone(), tracker.clone()
    torch._amp_update_scale_(scale, tracker, overflow, 2.0, 0.5, 2000)
    return scale, tracker


def offload(x: Tensor) -> Tensor:
    """`weft.offload`: a copy in host memory; for a GPU in pinned memory, on its way while others compute."""
    host = to_host(x)
    note_host(host)
    return host


def load(host: Tensor, device: torch.device, awaited: Tensor | None = None) -> Tensor:
    """`weft.load`: a copy of what `offload` made, on the device, once `awaited` is there."""
    return from_host(host, device)


def after(x: Tensor, awaited: Tensor) -> Tensor:
    """`weft.after`: `x`; whoever runs it has waited for `awaited`."""
    return x


PASS_OPS: dict[str, Callable[..., Any]] = {
    "weft.square_sum": square_sum,
    "weft.nonfinite": nonfinite,
    "weft.scale": scale,
    "weft.cast_parts": cast,
    "weft.cast_whole": cast,
    "weft.clip_factor": clip_factor,
    "weft.next_scale": next_scale,
    "weft.offload": offload,
    "weft.load": load,
    "weft.after": after,
}


def alone(x: Tensor, argument: Any) -> Tensor:
    """`weft.accumulate` and `weft.pack` of a single micro-batch, and `weft.use`: `x` itself."""
    return x


TIME_OPS: dict[str, Callable[..., Any]] = {
    "weft.accumulate": alone,
    "weft.pack": alone,
    "weft.use": alone,
}


@final
class Accumulate:
    """`weft.accumulate(x, reduction)`: the reduction of `x` over the micro-batches, in place.

    Args:
        owned: true where nobody else reads or keeps the memory of `x`, so that the first one may take
            the others in.
    """

    def __init__(self, micro_batches: int, owned: bool) -> None:
        self._last = micro_batches - 1
        self._owned = owned
        # The reduction so far; None between steps.
        self._total: Tensor | None = None

    def __call__(self, micro: int, x: Tensor, /, reduction: str) -> Tensor:
        total = self._total
        if total is None:
            total = x if self._owned else x.clone()
        elif x.dtype in SIGNED:
            total = reduce_in_order((total, x), reduction)
        else:
            COMBINE[reduction](total, x, out=total)
        self._total = None if micro == self._last else total
        return total


@final
class Pack:
    """`weft.pack(x, dim)`: the values of the micro-batches, all of one size, joined along `dim`."""

    def __init__(self, micro_batches: int, owned: bool = False) -> None:
        self._micro_batches = micro_batches
        # What is packed so far; None between steps.
        self._whole: Tensor | None = None

    def __call__(self, micro: int, x: Tensor, /, dim: int) -> Tensor:
        size = x.shape[dim]
        whole = self._whole
        if whole is None:
            shape = list(x.shape)
            shape[dim] *= self._micro_batches
            whole = x.new_empty(shape)
        whole.narrow(dim, micro * size, size).copy_(x)
        self._whole = None if micro + 1 == self._micro_batches else whole
        return whole


# Of (micro-batches, owned): something that takes the values of one step's micro-batches in order, as
# `(micro, x, argument)`; what it returns after the last one is the result.
OVER_STEP_OPS: dict[str, Callable[[int, bool], Callable[..., Tensor]]] = {
    "weft.accumulate": Accumulate,
    "weft.pack": Pack,
    SUMMED_PRODUCT: SumOfProducts,
}
