"""The ops that capture takes apart, because their results depend on counts or statistics of the whole batch.

Everything else stays as fused as autograd leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from weft.capture.fx.private import Decompositions
from weft.capture.ops import losses, random, statistics
from weft.capture.optimizers import fused
from weft.capture.python import assertions


def _copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return src.to(self.device, self.dtype).expand(self.shape)


def _fill(self: torch.Tensor, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(self.device, self.dtype).expand(self.shape)
    return torch.full_like(self, value)


# The ops that functionalization leaves of writes to a whole tensor: the old contents do not
# matter.
_OVERWRITES: dict[str, Callable[..., Any]] = {
    "copy.default": _copy,
    "fill.Scalar": _fill,
    "fill.Tensor": _fill,
    "zero.default": torch.zeros_like,
}


def _ones_like(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Any:
    """The seed of the backward reads nothing: it must not wait until the loss is reduced over the ranks."""
    if self.dim():
        return NotImplemented  # what is no seed stays as it is
    return torch.full((), 1, dtype=dtype or self.dtype, device=device or self.device)


_SEED: dict[str, Callable[..., Any]] = {"ones_like.default": _ones_like}


def _factors_itself(op: Any) -> Callable[..., Any]:
    """A determinant whose factors are those of the matrix, as backward expects them of one that is not contiguous."""
    # For a contiguous real matrix the kernel factorizes the transpose. A matrix may lie otherwise on a rank than it did
    # here, so the op is given one that lies so.

    def decomposed(A: torch.Tensor) -> Any:
        if A.is_contiguous() or A.is_complex():
            return NotImplemented
        return op(A.mT.contiguous())

    return decomposed


_FACTORED: dict[str, Callable[..., Any]] = {
    f"{name}.default": _factors_itself(getattr(torch.ops.aten, name).default)
    for name in ("_linalg_det", "_linalg_slogdet")
}


def _repeats(repeats: torch.Tensor, *, output_size: int | None = None) -> Any:
    """The number of its source for each of `output_size` repeated elements."""
    if output_size is None:
        return NotImplemented
    ends = repeats.cumsum(0)
    text = f"repeat_interleave: the repeats must not be negative, and add up to output_size={output_size}"
    right = (repeats.sum() == output_size) & (repeats >= 0).all()
    torch.ops.aten._assert_async.msg(right, text)
    places = torch.arange(output_size, device=repeats.device)
    found = torch.searchsorted(ends, places, right=True).clamp(max=len(repeats) - 1)
    return found.to(repeats.dtype)


def _resize_as(
    self: torch.Tensor,
    the_template: torch.Tensor,
    *,
    memory_format: torch.memory_format | None = None,
) -> Any:
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        return NotImplemented
    return self.resize_(the_template.shape)


# Ops that find a shape in an argument.
_SHAPED: dict[str, Callable[..., Any]] = {
    "repeat_interleave.Tensor": _repeats,
    "resize_as_.default": _resize_as,
}


def decompositions() -> Decompositions:
    """For the first trace: statistics, losses, random ops, and ops on lists of tensors."""
    named = {**_SEED, **_FACTORED, **statistics.TABLE, **statistics.BATCH_NORM, **losses.TABLE}
    named = {**named, **losses.CTC, **LEAST_SQUARES, **_SHAPED}
    named = {**named, **random.TABLE, **random.SAMPLES, **assertions.TABLE}
    found = _resolve({**named, **fused.NORMS, **fused.TABLE, **EXPERTS})
    return {**fused.foreach(), **found, **of_libraries()}


def overwrites() -> Decompositions:
    """For the functional trace: copies, fills and zeros in place."""
    return _resolve(_OVERWRITES)


def _resolve(table: Mapping[str, Callable[..., Any]]) -> Decompositions:
    found = {}
    for name, function in table.items():
        packet, overload = name.split(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if op is not None:
            found[op] = function
    return found


# Least squares: `weft.lstsq` where the shapes of its results do not depend on ranks of matrices.
#
# Drivers that compute singular values give residuals only of matrices of full rank; those of more rows
# than columns are left to torch, and so refused.


torch.library.define(
    "weft::lstsq",
    "(Tensor a, Tensor b, float? rcond, str driver) -> (Tensor, Tensor, Tensor, Tensor)",
)
_BY_SINGULAR_VALUES = ("gelss", "gelsd")


def _made(
    a: Tensor, b: Tensor, rcond: float | None, driver: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
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


LEAST_SQUARES: dict[str, Callable[..., Any]] = {"linalg_lstsq.default": _lstsq}


# Grouped products of mixtures of experts: `weft.expert_mm` in place of them.
#
# Torch's grouped product multiplies rows that are sorted by experts; `offs` says where the rows of
# each end. Its shape function takes bfloat16 alone. So the product is recorded by weft's own op, in any
# dtype, on rows that know their expert (`weft.ops.rules.own_ops`); rows after the last end are zeros.
# `transformers` has an op of its own for machines without torch's.


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


EXPERTS: dict[str, Callable[..., Any]] = {"_grouped_mm.default": _grouped_mm}

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
