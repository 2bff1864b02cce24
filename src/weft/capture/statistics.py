"""Means, variances and batch normalization as sums over the whole batch divided by the whole count.

A mean over a split dimension is not the mean of the ranks' means; a sum is the sum of the ranks'
sums. The counts are those of the logical tensors. Batch normalization follows Ioffe and Szegedy
(2015), in two passes: first the mean, then the sum of squared distances from it. Its means are
marked by `weft.statistic`: over ranks they are those of the whole batch, but of several
micro-batches each has its own, as when gradients are accumulated in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.capture.hint import capturing

aten = torch.ops.aten
Tensor = torch.Tensor


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


def _var(self: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    return NotImplemented if self.is_complex() else _moments(self, dim, correction, keepdim)[0]


def _var_mean(
    self: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    return NotImplemented if self.is_complex() else _moments(self, dim, correction, keepdim)


def _std(self: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    if self.is_complex():
        return NotImplemented
    return _moments(self, dim, correction, keepdim)[0].sqrt()


def _std_mean(
    self: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    if self.is_complex():
        return NotImplemented
    variance, mean = _moments(self, dim, correction, keepdim)
    return variance.sqrt(), mean


def _wide(x: Tensor) -> Tensor:
    """Half precision is summed in float32, as torch's kernels do."""
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def _channels(per_channel: Tensor, like: Tensor) -> Tensor:
    """Shape [C] -> [1, C, 1, ...], to stand beside `like`."""
    return per_channel.view([1, -1] + [1] * (like.dim() - 2))


def _normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor
) -> Tensor:
    out = (_wide(x) - _channels(mean, x)) * _channels(rstd, x)
    if weight is not None:
        out = out * _channels(weight, x)
    if bias is not None:
        out = out + _channels(bias, x)
    return out.to(x.dtype)


def _statistic(total: Tensor, count: int, correction: int = 0) -> Tensor:
    """`total`, a sum over `count` elements for each channel, divided by `count - correction`."""
    if not capturing():
        return total / (count - correction)
    marked: Tensor = torch.ops.weft.statistic(total, count, correction)
    return marked


@torch.library.custom_op(
    "weft::statistic",
    mutates_args=(),
    schema="(Tensor total, SymInt count, SymInt correction) -> Tensor",
)
def _marked_statistic(total: Tensor, count: int, correction: int) -> Tensor:
    return total / (count - correction)


@_marked_statistic.register_fake
def _(total: Tensor, count: int, correction: int) -> Tensor:
    return torch.empty_like(total)


def _over_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _batch_norm_training(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dims = _over_channels(x)
    count = _count(x, dims)
    wide = _wide(x)
    mean = _statistic(wide.sum(dims), count)
    distance = wide - _channels(mean, x)
    squares = (distance * distance).sum(dims)
    variance = _statistic(squares, count)
    rstd = torch.rsqrt(variance + eps)
    if running_mean is not None:
        _follow(running_mean, mean, momentum)
    if running_var is not None:
        _follow(running_var, _statistic(squares, count, 1), momentum)
    return _normalize(x, weight, bias, mean, rstd), mean, rstd


def _follow(running: Tensor, new: Tensor, momentum: float) -> None:
    running.copy_(running * (1 - momentum) + new * momentum)


def _native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if training:
        return _batch_norm_training(input, weight, bias, running_mean, running_var, momentum, eps)
    assert running_mean is not None  # torch checks it before
    assert running_var is not None
    rstd = torch.rsqrt(running_var + eps)
    out = _normalize(input, weight, bias, running_mean, rstd)
    nothing = input.new_empty([0])
    return out, nothing, nothing


def _batch_norm_no_stats(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _batch_norm_training(input, weight, bias, None, None, momentum, eps)


def _batch_norm_backward(
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
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dims = _over_channels(input)
    grad, x = _wide(grad_out), _wide(input)
    if train:
        assert save_mean is not None  # made by the forward
        assert save_invstd is not None
        mean, rstd = save_mean, save_invstd
    else:
        assert running_mean is not None
        assert running_var is not None
        mean, rstd = running_mean, torch.rsqrt(running_var + eps)
    normalized = (x - _channels(mean, x)) * _channels(rstd, x)
    grad_bias = grad.sum(dims)
    grad_weight = (grad * normalized).sum(dims)
    scale = rstd if weight is None else rstd * weight
    inner = grad
    if train:
        count = _count(x, dims)
        inner = (
            grad
            - _channels(_statistic(grad_bias, count), x)
            - normalized * _channels(_statistic(grad_weight, count), x)
        )
    parts = (
        (inner * _channels(scale, x)).to(input.dtype),
        grad_weight if weight is None else grad_weight.to(weight.dtype),
        grad_bias if weight is None else grad_bias.to(weight.dtype),
    )
    first, second, third = (
        part if wanted else None for part, wanted in zip(parts, output_mask, strict=True)
    )
    return first, second, third


TABLE: dict[str, Callable[..., Any]] = {
    "mean.default": _mean,
    "mean.dim": _mean_dim,
    "var.correction": _var,
    "var_mean.correction": _var_mean,
    "std.correction": _std,
    "std_mean.correction": _std_mean,
    "native_batch_norm.default": _native_batch_norm,
    "_native_batch_norm_legit.default": _native_batch_norm,
    "_native_batch_norm_legit.no_stats": _batch_norm_no_stats,
    "native_batch_norm_backward.default": _batch_norm_backward,
}
