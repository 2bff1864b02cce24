"""Tensors of a model that lie in the same memory, as a weight and a transposed view of it that is a parameter too.

Layouts are those of tensors, and parts lie on ranks: what is written to one of them could not be seen in the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations

import torch

from weft.errors import CaptureError
from weft.ir.logical import Input, LogicalGraph, Update

_OUTSIDE = "a tensor from outside that the step reads"


def check_memory(
    variables: Mapping[str, torch.Tensor], constants: Iterable[torch.Tensor], graph: LogicalGraph
) -> None:
    """Check that no memory which the step writes belongs to two of its tensors.

    Args:
        variables: parameters and buffers by name.
        constants: tensors that are none of the model's.
        graph: of the step; says what it writes.

    Raises:
        CaptureError: naming both tensors.
    """
    keys = {node.value.name: node.key for node in graph.of_kind(Input)}
    written = {keys[update.target.name] for update in graph.of_kind(Update)}
    for (one, x), (other, y) in _together(variables, constants):
        if not written.isdisjoint((one, other)) and _overlap(x, y):
            raise CaptureError(
                f"{one} and {other} lie in the same memory, and are different tensors. The step writes to it, and each "
                "tensor has a layout of its own, so that one would not see what is written to the other; expected "
                "memory of their own (tensor.clone()), or one tensor under both names, of which views, such as a "
                "transposed one, are taken where they are used"
            )


def _together(
    variables: Mapping[str, torch.Tensor], constants: Iterable[torch.Tensor]
) -> Iterator[tuple[tuple[str, torch.Tensor], tuple[str, torch.Tensor]]]:
    """Pairs of different tensors of one storage, of which one is of the model."""
    every: defaultdict[int, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, tensor in (*variables.items(), *((_OUTSIDE, each) for each in constants)):
        place = _storage(tensor)
        if place:
            every[place].append((name, tensor))
    for members in every.values():
        for one, other in combinations(members, 2):
            if one[0] != other[0]:
                yield one, other


def _storage(tensor: torch.Tensor) -> int:
    """The address of the storage of a plain tensor with values; 0 for others."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if not plain or tensor.is_meta or tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True where an element of one is an element of the other."""
    begins, ends = zip(*map(_extent, (one, other)), strict=True)
    if max(begins) >= min(ends):
        return False
    if one.is_contiguous() and other.is_contiguous():
        return True
    taken = torch.zeros(max(ends) - min(begins), dtype=torch.uint8)
    for tensor in (one, other):
        size = tensor.element_size()
        first = tensor.storage_offset() * size - min(begins)
        strides = [stride * size for stride in tensor.stride()]
        bytes_of = taken.as_strided((*tensor.shape, size), (*strides, 1), first)
        if tensor is other and bool(bytes_of.any()):
            return True
        bytes_of.fill_(1)
    return False


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one behind its last."""
    if not tensor.numel():
        return 0, 0
    begin, size = int(tensor.storage_offset()), tensor.element_size()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * size, (begin + last + 1) * size
