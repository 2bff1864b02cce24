"""The bytes that views show of a memory: whether some of them are the same."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch

# Up to how many bytes two views are compared one by one.
_MANY = 1 << 20
_Dims: TypeAlias = tuple[tuple[int, int], ...]


@final
@dataclass(frozen=True)
class View:
    """The bytes of a tensor in its memory: where they begin, strides and sizes in order, the largest stride first."""

    memory: torch.UntypedStorage
    start: int
    order: _Dims
    dims: _Dims

    @property
    def end(self) -> int:
        """The last byte."""
        return self.start + _extent(self.dims)

    def overlaps_itself(self) -> bool:
        """True where several elements may lie at one place."""
        return any(
            stride <= _extent(self.dims[at + 1 :]) for at, (stride, _) in enumerate(self.dims)
        )

    def meets(self, other: View) -> bool:
        """True where another view shows some of the bytes, but not the same ones in the same order."""
        same = self.start == other.start and self.order == other.order
        return self.memory is other.memory and not same and self.overlaps(other)

    def overlaps(self, other: View) -> bool:
        """True where a view of the same memory shows some of the bytes."""
        if self.start > other.end or other.start > self.end:
            return False
        for one, two in ((self, other), (other, self)):
            dense = _count(one.dims) == _extent(one.dims) + 1
            if dense and (one.start <= two.start or two.end <= one.end):
                return True
        return _meet(self.start - other.start, self.dims, other.dims)


def views_of(values: Iterable[Any]) -> list[View]:
    """The views that dense tensors among some values are, empty ones left out."""
    return [_view(x) for x in values if isinstance(x, torch.Tensor) and _has_bytes(x)]


def _has_bytes(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.numel() > 0


def _view(tensor: torch.Tensor) -> View:
    width = tensor.element_size()
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    every = (*((int(stride) * width, int(size)) for stride, size in dims), (1, width))
    kept = tuple(each for each in every if each[1] > 1)
    start = int(tensor.storage_offset()) * width
    return View(tensor.untyped_storage(), start, kept, tuple(sorted(kept, reverse=True)))


def _extent(dims: _Dims) -> int:
    return sum(stride * (size - 1) for stride, size in dims)


def _count(dims: _Dims) -> int:
    return math.prod(size for _, size in dims)


def _meet(apart: int, one: _Dims, two: _Dims) -> bool:
    """True where views that begin so far apart have a byte in common."""
    while one and two and one[0] == two[0]:
        if abs(apart) + max(_extent(one[1:]), _extent(two[1:])) >= one[0][0]:
            break
        one, two = one[1:], two[1:]  # bytes of other rows are other ones
    if max(_count(one), _count(two)) > _MANY:
        return True
    return not _places(apart, one).isdisjoint(_places(0, two))


def _places(start: int, dims: _Dims) -> set[int]:
    found = {start}
    for stride, size in dims:
        found = {place + stride * i for place in found for i in range(size)}
    return found
