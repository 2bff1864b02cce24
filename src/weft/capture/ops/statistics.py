"""Means and variances as sums over the whole batch divided by the whole count.

A mean over a split dimension is not the mean of the ranks' means; a sum is the sum of the ranks'
sums. The counts are those of the logical tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.capture.hint import capturing

aten = torch.ops.aten


def _dims(x: Tensor, dim: Sequence[int] | int | None) -> list[int]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(x.dim()))
    return [dim] if isinstance(dim, int) else list(dim)


def _count(x: Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[dim] for dim in dims if x.dim())  # a scalar counts as one


def _mean(self: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return aten.sum.default(self, dtype=dtype) / self.numel()  # type: ignore[no-any-return]


def _mean_dim(
    self: Tensor,
    dim: Sequence[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    dims = _dims(self, dim)
    total = aten.sum.dim_IntList(self, dims, keepdim, dtype=dtype)
    return total / _count(self, dims)  # type: ignore[no-any-return]


def _moments(
    x: Tensor, dim: Sequence[int] | None, correction: float | None, keepdim: bool
) -> tuple[Tensor, Tensor]:
    dims = _dims(x, dim)
    count = _count(x, dims)
    mean = x.sum(dims, keepdim=True) / count
    distance = x - mean
    squares = (distance * distance).sum(dims, keepdim=keepdim)
    variance = squares / max(count - (1 if correction is None else correction), 0)
    return variance, mean if keepdim else mean.squeeze(dims)


def _of_moments(finish: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    """An op that makes its results of variance and mean."""

    def decomposed(
        self: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
    ) -> Any:
        if self.is_complex():
            return NotImplemented
        return finish(*_moments(self, dim, correction, keepdim))

    return decomposed


TABLE: dict[str, Callable[..., Any]] = {
    "mean.default": _mean,
    "mean.dim": _mean_dim,
    "var.correction": _of_moments(lambda variance, _: variance),
    "var_mean.correction": _of_moments(lambda variance, mean: (variance, mean)),
    "std.correction": _of_moments(lambda variance, _: variance.sqrt()),
    "std_mean.correction": _of_moments(lambda variance, mean: (variance.sqrt(), mean)),
}


# Batch normalization in training: one functional op when captured, sums over the batch for eager global tensors.
#
# A captured one keeps ATen's fused kernels wherever the batch is whole; where it is split,
# `weft.compiler.decompositions.batch_norm` takes it apart, so that statistics are those of the whole batch.
# Evaluation needs no statistics: those ops stay as they are. Formulas: Ioffe and Szegedy (2015), in
# two passes: first the mean, then the sum of squared distances from it.


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
    """A function of its operands; the casts give statistics of half precision the dtype that the kernels give them."""
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
    dims, count = _over_channels(x), _of_each_channel(x)
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
    dims, count = _over_channels(x), _of_each_channel(x)
    normalized = (x - _channels(mean, x)) * _channels(rstd, x)
    to_bias = grad.sum(dims)
    to_weight = (grad * normalized).sum(dims)
    scale = rstd if weight is None else rstd * weight
    inner = grad - _channels(to_bias / count, x) - normalized * _channels(to_weight / count, x)
    return inner * _channels(scale, x), to_weight, to_bias


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def _channels(per_channel: Tensor, like: Tensor) -> Tensor:
    """Shape [C] -> [1, C, 1, ...], to stand beside `like`."""
    return per_channel.view([1, -1] + [1] * (like.dim() - 2))


def _over_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _of_each_channel(x: Tensor) -> int:
    return x.numel() // x.shape[1]


BATCH_NORM: dict[str, Callable[..., Any]] = {
    "native_batch_norm.default": _native_batch_norm,
    "_native_batch_norm_legit.default": _legit,
    "_native_batch_norm_legit.no_stats": _without_running,
    "native_batch_norm_backward.default": _backward,
}
