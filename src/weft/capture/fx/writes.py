"""Writes that no graph holds: such as PyTorch refuses or leaves open, and such as give a tensor another shape.

PyTorch refuses, or leaves open, what comes of writes to one place for several elements, and to what is read otherwise
by the same op. Of ops that write arguments which they do not return, shapes on tensors without data are not to be
believed: torch's observers of quantization give their buffers the shape that they need in their first call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch

from weft.capture.fx.private import values_made, written_by

_EXPANDED = (
    "writes to a tensor of which several elements lie at one place in memory, as expand, broadcast_to, unfold and "
    "as_strided make them: PyTorch refuses that, or leaves open what comes of it; clone() the tensor before"
)
_READ = (
    "writes to memory that it reads through another view: PyTorch refuses that, or leaves open what comes of it; "
    "clone() what it reads"
)
_ALIASING = (
    "writes to an argument, or gives a view of one, which in a graph ops of PyTorch alone may do; expected one that "
    "makes new tensors, such as a torch.library.custom_op with mutates_args=()"
)
_RESIZES = (
    "gives a tensor that it writes another shape when it first runs, from {} to {}; call the model once before "
    "compiling"
)
# Up to how many elements an op is tried.
_TRIED = 1 << 25
# Up to how many bytes two views are compared one by one.
_MANY = 1 << 20
_Dims: TypeAlias = tuple[tuple[int, int], ...]


def reason_against_write(node: torch.fx.Node) -> str | None:
    """The reason why no graph may hold what a node of a trace writes; None where it may, or writes nothing."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or torch.Tag.inplace_view in op.tags:
        return None
    every = (*op._schema.arguments, *op._schema.returns)
    if op.namespace not in ("aten", "prims", "weft") and any(each.alias_info for each in every):
        return _ALIASING
    written = [x for x in written_by(op, node.args, node.kwargs) if isinstance(x, torch.fx.Node)]
    others = [x for x in node.all_input_nodes if x not in written] if written else []
    views, read = ([v for v in map(_Bytes.of, each) if v is not None] for each in (written, others))
    if any(view.overlaps_itself() for view in views):
        return _EXPANDED
    if any(one.meets(other) for one in views for other in read):
        return _READ
    returned = any(result.alias_info for result in op._schema.returns)
    return None if returned or not op._schema.returns else _tried(op, node, written)


def _tried(op: Any, node: torch.fx.Node, written: list[torch.fx.Node]) -> str | None:
    """The reason against an op that, run on tensors full of ones, gives what it writes another shape."""
    given = {x: x.meta["val"] for x in node.all_input_nodes}
    if sum(x.numel() for x in given.values()) > _TRIED:
        return None
    with values_made():
        ones = {each: torch.ones(x.shape, dtype=x.dtype) for each, x in given.items()}
        try:
            op(*torch.fx.map_arg(node.args, ones.get), **torch.fx.map_arg(node.kwargs, ones.get))
        except Exception:  # such values are not for it
            return None
    for each in written:
        if ones[each].shape != given[each].shape:
            return _RESIZES.format(list(given[each].shape), list(ones[each].shape))
    return None


@final
@dataclass(frozen=True)
class _Bytes:
    """The bytes of a tensor in its memory: where they begin, strides and sizes in order, the largest stride first."""

    memory: torch.UntypedStorage
    start: int
    order: _Dims
    dims: _Dims

    @staticmethod
    def of(node: torch.fx.Node) -> _Bytes | None:
        """The view that a node gives; None where it is no dense tensor, or an empty one."""
        tensor = node.meta.get("val")
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            return None
        if not tensor.numel():
            return None
        width = tensor.element_size()
        dims = zip(tensor.stride(), tensor.shape, strict=True)
        every = (*((int(stride) * width, int(size)) for stride, size in dims), (1, width))
        kept = tuple(each for each in every if each[1] > 1)
        start = int(tensor.storage_offset()) * width
        return _Bytes(tensor.untyped_storage(), start, kept, tuple(sorted(kept, reverse=True)))

    @property
    def end(self) -> int:
        """The last byte."""
        return self.start + _extent(self.dims)

    def overlaps_itself(self) -> bool:
        """True where several elements may lie at one place."""
        return any(
            stride <= _extent(self.dims[at + 1 :]) for at, (stride, _) in enumerate(self.dims)
        )

    def meets(self, other: _Bytes) -> bool:
        """True where another view shows some of the bytes, but not the same ones in the same order."""
        apart = self.start - other.start
        if self.memory is not other.memory or (apart == 0 and self.order == other.order):
            return False
        if self.start > other.end or other.start > self.end:
            return False
        for one, two in ((self, other), (other, self)):
            dense = _count(one.dims) == _extent(one.dims) + 1
            if dense and (one.start <= two.start or two.end <= one.end):
                return True
        return _meet(apart, self.dims, other.dims)


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
