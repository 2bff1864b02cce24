"""Grouped products of mixtures of experts: `weft.expert_mm` in place of them.

Torch's grouped product multiplies rows that are sorted by experts; `offs` says where the rows of
each end. Its shape function takes bfloat16 alone. So the product is recorded by weft's own op, in any
dtype, on rows that know their expert (`weft.ops.rules.own.experts`); rows after the last end are zeros.
`transformers` has an op of its own for machines without torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

torch.library.define("weft::segments", "(Tensor offs, int rows, int first) -> Tensor")
torch.library.define("weft::expert_mm", "(Tensor x, Tensor w, Tensor ids, int offset) -> Tensor")
torch.library.define(
    "weft::expert_gradient",
    "(Tensor x, Tensor g, Tensor ids, int experts, int offset) -> Tensor",
)


def _segments(offs: Tensor, rows: int, first: int) -> Tensor:
    return offs.new_empty(rows, dtype=torch.int64)


def _expert_mm(x: Tensor, w: Tensor, ids: Tensor, offset: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[-1])


def _expert_gradient(x: Tensor, g: Tensor, ids: Tensor, experts: int, offset: int) -> Tensor:
    return x.new_empty(experts, x.shape[-1], g.shape[-1])


torch.library.register_fake("weft::segments", _segments)
torch.library.register_fake("weft::expert_mm", _expert_mm)
torch.library.register_fake("weft::expert_gradient", _expert_gradient)


def _product(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    """Rows [s, k] that are sorted by experts, times their matrices [e, k, n]."""
    ids = torch.ops.weft.segments(offs, x.shape[0], 0)
    product: Tensor = torch.ops.weft.expert_mm(x, w, ids, 0)
    return product


def _sums(x: Tensor, g: Tensor, offs: Tensor) -> Tensor:
    """`x[rows]ᵀ g[rows]` of each expert: [s, k] and [s, n] to [e, k, n]."""
    ids = torch.ops.weft.segments(offs, x.shape[0], 0)
    found: Tensor = torch.ops.weft.expert_gradient(x, g, ids, offs.shape[0], 0)
    return found


def _grouped_mm(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Torch's op by what is grouped: rows, the contracted dimension, columns, or nothing."""
    if bias is not None or out_dtype not in (None, self.dtype) or self.dtype != mat2.dtype:
        return NotImplemented
    if offs is None:
        return torch.bmm(self, mat2)
    if mat2.dim() == 3:
        return _product(self, mat2, offs)
    if self.dim() == 2:
        return _sums(self.t(), mat2, offs)
    return _product(mat2.t(), self.transpose(1, 2), offs).t()


def _gradients(x: Tensor, w: Tensor, offs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    return _product(grad, w.transpose(1, 2), offs), _sums(x, grad, offs)


TABLE: dict[str, Callable[..., Any]] = {"_grouped_mm.default": _grouped_mm}

_OF_TRANSFORMERS: dict[str, Callable[..., Any]] = {
    "grouped_mm_fallback": _product,
    "grouped_mm_fallback_backward": _gradients,
}


def of_libraries() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """The functions that stand for ops of libraries, for those libraries that are loaded."""
    named = (
        (getattr(torch.ops.transformers, name, None), f) for name, f in _OF_TRANSFORMERS.items()
    )
    return {packet.default: function for packet, function in named if packet is not None}
