"""Ops without a sharding rule: torch's own decomposition into ops that have one, where there is any.

An op without a rule and without a decomposition stays; it runs whole when it is a plain function
(`weft.ops.rule`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions

from weft.capture.fx.private import Decompositions
from weft.ops import has_rule

aten = torch.ops.aten

# Their decompositions write memory by strides, draw random numbers, are longer than what they stand
# for, or differ from the kernel (`python -m tools.opinfo` compares them).
_KEPT = ("as_strided", "empty", "resize", "_fft", "_unsafe_masked_index", "linspace")


def fallback() -> Decompositions:
    """Decompositions of the ops that no rule knows; rules that users declare are looked up anew each time."""
    found = {op: function for op, function in _core().items() if not _has_rule(str(op))}
    own: Decompositions = {
        aten._efficientzerotensor.default: _zeros,
        aten.index_fill.int_Tensor: _index_fill,
        # Questions about shapes, which forward-mode derivatives ask; the answers are known.
        aten.is_same_size.default: lambda self, other: self.shape == other.shape,
        aten._has_same_storage_numel.default: lambda self, other: _numel(self) == _numel(other),
    }
    return {**found, **own}


def _has_rule(op: str) -> bool:
    """True where the op has a rule, or the one that returns the written tensor has: writes become functions."""
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
    return {
        aten.as_strided.default: _as_strided,
        aten.as_strided_copy.default: _as_strided,
        aten.as_strided_scatter.default: _strided_write,
    }


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


def _numel(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.itemsize


def _zeros(size: Sequence[int], **options: Any) -> torch.Tensor:
    named = {key: value for key, value in options.items() if key in ("dtype", "device")}
    return torch.zeros(list(size), **named)


def _index_fill(self: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor) -> Any:
    size = self.shape[dim] if self.dim() else 1
    index = torch.where(index < 0, index + size, index)
    return _core()[aten.index_fill.int_Tensor](self, dim, index, value)
