"""The ops that capture decomposes, because their results depend on counts or statistics of the whole batch.

Ops without a sharding rule use torch's decomposition. All other ops stay fused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions

from weft.capture.fx.private import Decompositions, shapes_of, stands_for
from weft.capture.ops import random, statistics
from weft.capture.optimizers import fused
from weft.capture.python import assertions
from weft.ops import has_rule

aten = torch.ops.aten
TABLE: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
# The ops that functionalization leaves of writes to a whole tensor: the old contents do not matter.
_OVERWRITES: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


@stands_for(_OVERWRITES, "copy.default")
def _copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return src.to(self.device, self.dtype).expand(self.shape)


@stands_for(_OVERWRITES, "fill.Scalar", "fill.Tensor")
def _fill(self: torch.Tensor, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(self.device, self.dtype).expand(self.shape)
    return torch.full_like(self, value)


stands_for(_OVERWRITES, "zero.default")(torch.zeros_like)


@stands_for(TABLE, "ones_like.default")
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
        return NotImplemented  # what is not a seed stays as it is
    return torch.full((), 1, dtype=dtype or self.dtype, device=device or self.device)


def _factors_itself(op: Any, A: torch.Tensor) -> Any:
    """A determinant whose factors are those of the matrix, as backward expects them of one that is not contiguous."""
    # The kernel factorizes the transpose of a contiguous real matrix. Strides on a rank may differ from those here, so
    # the op is given a matrix with the strides that the kernel factorizes as it is.
    return NotImplemented if A.is_contiguous() or A.is_complex() else op(A.mT.contiguous())


for _op in (aten._linalg_det.default, aten._linalg_slogdet.default):
    TABLE[_op] = partial(_factors_itself, _op)


@stands_for(TABLE, "repeat_interleave.Tensor")
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


@stands_for(TABLE, "resize_as_.default")
def _resize_as(
    self: torch.Tensor,
    the_template: torch.Tensor,
    *,
    memory_format: torch.memory_format | None = None,
) -> Any:
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        return NotImplemented
    return self.resize_(the_template.shape)


def decompositions() -> Decompositions:
    """For the first trace: statistics, losses, random ops, and ops on lists of tensors."""
    return {
        **fused.foreach(),
        **TABLE,
        **statistics.TABLE,
        **random.TABLE,
        **assertions.TABLE,
        **fused.NORMS,
        **fused.TABLE,
        **of_libraries(),
    }


def overwrites() -> Decompositions:
    """For the functional trace: copies, fills and zeros in place."""
    return _OVERWRITES


# Least squares: `weft.lstsq` where the shapes of its results do not depend on ranks of matrices.
#
# Drivers that compute singular values give residuals only of matrices of full rank; those of more rows
# than columns are left to torch, and so refused.


torch.library.define(
    "weft::lstsq",
    "(Tensor a, Tensor b, float? rcond, str driver) -> (Tensor, Tensor, Tensor, Tensor)",
)
_BY_SINGULAR_VALUES = ("gelss", "gelsd")


@shapes_of("weft::lstsq")
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


@stands_for(TABLE, "linalg_lstsq.default")
def _lstsq(
    self: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> Any:
    driver = driver or ("gelsy" if self.device.type == "cpu" else "gels")
    m, n = self.shape[-2:]
    same = self.shape[:-1] == b.shape[: self.dim() - 1] and b.dim() in (self.dim() - 1, self.dim())
    if not same or (m > n and driver in _BY_SINGULAR_VALUES) or not b.numel():
        return NotImplemented
    return torch.ops.weft.lstsq(self, b, rcond, driver)


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


@shapes_of("weft::segments")
def _segments(offs: Tensor, rows: int, first: int) -> Tensor:
    return offs.new_empty(rows, dtype=torch.int64)


@shapes_of("weft::expert_mm")
def _expert_mm(x: Tensor, w: Tensor, ids: Tensor, offset: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[-1])


@shapes_of("weft::expert_gradient")
def _expert_gradient(x: Tensor, g: Tensor, ids: Tensor, experts: int, offset: int) -> Tensor:
    return x.new_empty(experts, x.shape[-1], g.shape[-1])


def _product(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    ids = torch.ops.weft.segments(offs, x.shape[0], 0)
    product: Tensor = torch.ops.weft.expert_mm(x, w, ids, 0)
    return product


def _sums(x: Tensor, g: Tensor, offs: Tensor) -> Tensor:
    """`x[rows]ᵀ g[rows]` of each expert: [s, k] and [s, n] to [e, k, n]."""
    ids = torch.ops.weft.segments(offs, x.shape[0], 0)
    found: Tensor = torch.ops.weft.expert_gradient(x, g, ids, offs.shape[0], 0)
    return found


@stands_for(TABLE, "_grouped_mm.default")
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


_OF_TRANSFORMERS: dict[str, Callable[..., Any]] = {
    "grouped_mm_fallback": _product,
    "grouped_mm_fallback_backward": lambda x, w, offs, grad: (
        _product(grad, w.transpose(1, 2), offs),
        _sums(x, grad, offs),
    ),
}


def of_libraries() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """The functions that stand for ops of libraries, for those libraries that are loaded."""
    named = (
        (getattr(torch.ops.transformers, name, None), f) for name, f in _OF_TRANSFORMERS.items()
    )
    return {packet.default: function for packet, function in named if packet is not None}


# Ops without a sharding rule: torch's own decomposition into ops that have one, where there is any. An op without a
# rule and without a decomposition stays; it runs whole when it is a plain function (`weft.ops.rule`).


# Their decompositions write memory by strides, draw random numbers, are longer than what they stand
# for, or differ from the kernel (`python -m tools.opinfo` compares them).
_KEPT = ("as_strided", "empty", "resize", "_fft", "_unsafe_masked_index", "linspace")
_OWN: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
_STRIDED: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


def fallback() -> Decompositions:
    """Decompositions of the ops that no rule knows; rules that users declare are looked up again each time."""
    found = {op: function for op, function in _core().items() if not _has_rule(str(op))}
    return {**found, **_OWN}


def _has_rule(op: str) -> bool:
    """True if the op has a rule, or the one that returns the written tensor has: writes become functions."""
    name, _, overload = op.rpartition(".")
    return has_rule(op) or (name.endswith("_") and has_rule(f"{name[:-1]}.{overload}"))


@cache
def _core() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    table: dict[Any, Callable[..., Any]] = dict(core_aten_decompositions())
    return {
        op: function
        for op, function in table.items()
        if isinstance(op, torch._ops.OpOverload)
        and torch.Tag.nondeterministic_seeded not in op.tags
        and not any(word in str(op) for word in _KEPT)
    }


def strided() -> Decompositions:
    """For the functional trace: views by strides as reads and writes at positions, where the strides are the usual."""
    return _STRIDED


def _positions(
    size: Sequence[int], stride: Sequence[int], offset: int, device: torch.device
) -> torch.Tensor:
    """Positions of the elements of a strided view in the memory of a contiguous tensor."""
    position = torch.full((), offset, dtype=torch.int64, device=device)
    for dim, (length, step) in enumerate(zip(size, stride, strict=True)):
        along = torch.arange(length, device=device) * step
        position = position + along.view([-1] + [1] * (len(size) - dim - 1))
    return position


def _usual(x: torch.Tensor) -> bool:
    return x.is_contiguous() and x.storage_offset() == 0


@stands_for(_STRIDED, "as_strided.default", "as_strided_copy.default")
def _as_strided(
    self: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Any:
    if not _usual(self):
        return NotImplemented
    positions = _positions(size, stride, storage_offset or 0, self.device)
    return aten.index.Tensor(self.reshape(-1), [positions])


@stands_for(_STRIDED, "as_strided_scatter.default")
def _strided_write(
    self: torch.Tensor,
    src: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Any:
    if not _usual(self):
        return NotImplemented
    positions = _positions(size, stride, storage_offset or 0, self.device)
    return aten.index_put.default(self.reshape(-1), [positions], src).view(self.shape)


# Questions about shapes, which forward-mode derivatives ask; the answers are known.
@stands_for(_OWN, "is_same_size.default")
def _is_same_size(self: torch.Tensor, other: torch.Tensor) -> bool:
    return self.shape == other.shape


@stands_for(_OWN, "_has_same_storage_numel.default")
def _has_same_storage_numel(self: torch.Tensor, other: torch.Tensor) -> bool:
    one, two = (x.untyped_storage().nbytes() // x.itemsize for x in (self, other))
    return one == two


@stands_for(_OWN, "_efficientzerotensor.default")
def _zeros(size: Sequence[int], **options: Any) -> torch.Tensor:
    named = {key: value for key, value in options.items() if key in ("dtype", "device")}
    return torch.zeros(list(size), **named)


@stands_for(_OWN, "index_fill.int_Tensor")
def _index_fill(self: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor) -> Any:
    size = self.shape[dim] if self.dim() else 1
    index = torch.where(index < 0, index + size, index)
    return _core()[aten.index_fill.int_Tensor](self, dim, index, value)
