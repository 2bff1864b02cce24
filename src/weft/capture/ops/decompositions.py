"""The ops that capture takes apart, because their results depend on counts or statistics of the whole batch.

Everything else stays as fused as autograd leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from weft.capture.fx.private import Decompositions
from weft.capture.ops import batch_norm, ctc, experts, losses, lstsq, random, sampling, statistics
from weft.capture.optimizers import fused
from weft.capture.python import caught


def _copy(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return src.to(self.device, self.dtype).expand(self.shape)


def _fill(self: torch.Tensor, value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.to(self.device, self.dtype).expand(self.shape)
    return torch.full_like(self, value)


# What functionalization leaves of writes that overwrite a whole tensor: the old contents do not
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
    """A determinant whose factors are those of the matrix, as backward expects them of one that is not contiguous.

    Of a contiguous real matrix the kernel factorizes the transpose. Whether a matrix lies so on a rank is
    another question than whether it did here, so it is given one that does.
    """

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
    named = {**_SEED, **_FACTORED, **statistics.TABLE, **batch_norm.TABLE, **losses.TABLE}
    named = {**named, **ctc.TABLE, **lstsq.TABLE, **_SHAPED}
    named = {**named, **random.TABLE, **sampling.TABLE, **caught.TABLE}
    found = _resolve({**named, **fused.NORMS, **fused.TABLE, **experts.TABLE})
    return {**fused.foreach(), **found, **experts.of_libraries()}


def overwrites() -> Decompositions:
    """For the functional trace: copies, fills and zeros in place."""
    return _resolve(_OVERWRITES)


def _resolve(table: Mapping[str, Callable[..., Any]]) -> Decompositions:
    """ATen overloads by name; those that this torch does not have cannot occur either."""
    found = {}
    for name, function in table.items():
        packet, overload = name.split(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if op is not None:
            found[op] = function
    return found
