"""Batch normalization in training: one functional op when captured, sums over the batch for eager global tensors.

A captured one keeps ATen's fused kernels wherever the batch is whole; where it is split,
`weft.compiler.families.batch_norm` takes it apart, so that statistics are those of the whole batch.
Evaluation needs no statistics: those ops stay as they are. Formulas: Ioffe and Szegedy (2015), in
two passes: first the mean, then the sum of squared distances from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.capture.hint import capturing

aten = torch.ops.aten
Tensor = torch.Tensor


def _native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not training:
        return NotImplemented
    args = (input, weight, bias, running_mean, running_var, momentum, eps)
    if not capturing():
        return _taken_apart(*args)
    if running_mean is not None:
        return _functional(*args)
    return NotImplemented


def _legit(*args: Any) -> Any:
    """The same op under another name, which no rule knows in evaluation."""
    found = _native_batch_norm(*args)
    return aten.native_batch_norm.default(*args) if found is NotImplemented else found


def _without_running(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    return aten.native_batch_norm.default(input, weight, bias, None, None, training, momentum, eps)


def _functional(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Any,
    running_var: Any,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """A function of its operands: new running statistics are results.

    Of half precision, its shape function gives statistics the dtype of `x`, while the kernels give
    them that of the parameters; the casts say so.
    """
    out, mean, rstd, *new = aten._native_batch_norm_legit_functional.default(
        x, weight, bias, running_mean, running_var, True, momentum, eps
    )
    running_mean.copy_(new[0])
    running_var.copy_(new[1])
    dtype = running_mean.dtype if weight is None else weight.dtype
    return out, mean.to(dtype), rstd.to(dtype)


def _taken_apart(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dims, count = _over_channels(x), _count(x)
    wide = _wide(x)
    mean = wide.sum(dims) / count
    distance = wide - _channels(mean, x)
    squares = (distance * distance).sum(dims)
    rstd = torch.rsqrt(squares / count + eps)
    if running_mean is not None:
        _follow(running_mean, mean, momentum)
    if running_var is not None:
        _follow(running_var, squares / (count - 1), momentum)
    out = distance * _channels(rstd, x)
    if weight is not None:
        out = out * _channels(weight, x)
    if bias is not None:
        out = out + _channels(bias, x)
    dtype = mean.dtype if weight is None else weight.dtype  # as the kernels give statistics
    return out.to(x.dtype), mean.to(dtype), rstd.to(dtype)


def _follow(running: Tensor, new: Tensor, momentum: float) -> None:
    running.copy_(running * (1 - momentum) + new * momentum)


def _backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Any:
    if not train:
        return NotImplemented
    if capturing():
        # In training the running statistics are given, but not read.
        if running_mean is None:
            return NotImplemented
        return aten.native_batch_norm_backward.default(
            grad_out, input, weight, None, None, save_mean, save_invstd, True, eps, output_mask
        )
    assert save_mean is not None  # made by the forward
    assert save_invstd is not None
    found = _gradients(_wide(grad_out), _wide(input), weight, save_mean, save_invstd)
    dtypes = (input.dtype, *[None if weight is None else weight.dtype] * 2)
    return tuple(
        one.to(dtype or one.dtype) if wanted else None
        for one, dtype, wanted in zip(found, dtypes, output_mask, strict=True)
    )


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dims, count = _over_channels(x), _count(x)
    normalized = (x - _channels(mean, x)) * _channels(rstd, x)
    to_bias = grad.sum(dims)
    to_weight = (grad * normalized).sum(dims)
    scale = rstd if weight is None else rstd * weight
    inner = grad - _channels(to_bias / count, x) - normalized * _channels(to_weight / count, x)
    return inner * _channels(scale, x), to_weight, to_bias


def _wide(x: Tensor) -> Tensor:
    """Half precision is summed in float32, as torch's kernels do."""
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def _channels(per_channel: Tensor, like: Tensor) -> Tensor:
    """Shape [C] -> [1, C, 1, ...], to stand beside `like`."""
    return per_channel.view([1, -1] + [1] * (like.dim() - 2))


def _over_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _count(x: Tensor) -> int:
    return x.numel() // x.shape[1]


TABLE: dict[str, Callable[..., Any]] = {
    "native_batch_norm.default": _native_batch_norm,
    "_native_batch_norm_legit.default": _legit,
    "_native_batch_norm_legit.no_stats": _without_running,
    "native_batch_norm_backward.default": _backward,
}
