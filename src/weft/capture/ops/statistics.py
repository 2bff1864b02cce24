"""Means and variances as sums over the whole batch divided by the whole count.

A mean over a split dimension is not the mean of the ranks' means; a sum is the sum of the ranks'
sums. The counts are those of the logical tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

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


TABLE: dict[str, Callable[..., Any]] = {
    "mean.default": _mean,
    "mean.dim": _mean_dim,
    "var.correction": _var,
    "var_mean.correction": _var_mean,
    "std.correction": _std,
    "std_mean.correction": _std_mean,
}
