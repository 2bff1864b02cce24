"""Least squares: `weft.lstsq` where the shapes of its results do not depend on ranks of matrices.

Drivers that compute singular values give residuals only of matrices of full rank; those of more rows
than columns are left to torch, and so refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

torch.library.define(
    "weft::lstsq",
    "(Tensor a, Tensor b, float? rcond, str driver) -> (Tensor, Tensor, Tensor, Tensor)",
)
_BY_SINGULAR_VALUES = ("gelss", "gelsd")


def _made(
    a: Tensor, b: Tensor, rcond: float | None, driver: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Results of `weft.lstsq`, without values: solution, residuals, ranks, singular values."""
    *batch, m, n = a.shape
    columns = b.shape[a.dim() - 1 :]
    residuals = (*batch, *columns) if m > n and driver == "gels" else (0,)
    ranks = (0,) if driver == "gels" else tuple(batch)
    values = (*batch, min(m, n)) if driver in _BY_SINGULAR_VALUES else (0,)
    return (
        b.new_empty((*batch, n, *columns)),
        b.new_empty(residuals),
        a.new_empty(ranks, dtype=torch.int64),
        a.new_empty(values, dtype=a.real.dtype if a.is_complex() else a.dtype),
    )


torch.library.register_fake("weft::lstsq", _made)


def _lstsq(
    self: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> Any:
    driver = driver or ("gelsy" if self.device.type == "cpu" else "gels")
    m, n = self.shape[-2:]
    same = self.shape[:-1] == b.shape[: self.dim() - 1] and b.dim() in (self.dim() - 1, self.dim())
    if not same or (m > n and driver in _BY_SINGULAR_VALUES) or not b.numel():
        return NotImplemented
    return torch.ops.weft.lstsq(self, b, rcond, driver)


TABLE: dict[str, Callable[..., Any]] = {"linalg_lstsq.default": _lstsq}
