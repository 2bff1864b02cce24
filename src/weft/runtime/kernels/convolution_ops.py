"""Convolutions of no input channels, of which torch makes wrong shapes and no gradient of the bias.

A rank has none where the channels are split along several axes and there are fewer than ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """`aten.convolution`; what no input channels make is zero, and the bias."""
    made: Tensor = _FORWARD(x, weight, bias, *rest)
    if x.shape[1]:
        return made
    transposed = rest[3]
    channels = weight.shape[1 if transposed else 0]
    zeros = x.new_zeros((x.shape[0], channels, *made.shape[2:]))
    return zeros if bias is None else zeros.add_(bias.view(-1, *(1,) * (x.dim() - 2)))


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any
) -> tuple[Tensor | None, ...]:
    """`aten.convolution_backward`; the gradient of the bias does not depend on the input channels."""
    if x.shape[1]:
        found: tuple[Tensor | None, ...] = _BACKWARD(grad, x, weight, bias_sizes, *rest)
        return found
    mask: Sequence[bool] = rest[-1]
    sums = grad.sum([0, *range(2, grad.dim())]) if mask[2] else None
    return *(
        torch.empty_like(one) if m else None for one, m in zip((x, weight), mask, strict=False)
    ), sums


CONVOLUTION_OPS: dict[str, Callable[..., Any]] = {
    "aten.convolution.default": convolution,
    "aten.convolution_backward.default": convolution_backward,
}
