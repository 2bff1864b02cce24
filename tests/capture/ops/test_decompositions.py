"""Views by strides as reads and writes at positions: what the kernels give, where tensors lie as usual."""

from __future__ import annotations

from math import prod

import pytest
import torch

from weft.capture.ops.decompositions import strided

aten = torch.ops.aten
X = torch.arange(24.0).view(4, 6)
# Sizes, strides and offset of views of 24 elements.
VIEWS: list[tuple[list[int], list[int], int]] = [
    ([], [], 5),
    ([3], [2], 1),
    ([0], [1], 0),
    ([4, 6], [6, 1], 0),
    ([6, 4], [1, 6], 0),
    ([2, 3, 2], [12, 4, 1], 1),
    ([3, 2, 1, 2], [1, 3, 24, 9], 2),
]


@pytest.mark.parametrize(("size", "stride", "offset"), VIEWS)
@pytest.mark.parametrize("op", [aten.as_strided.default, aten.as_strided_copy.default])
def test_reads(op: object, size: list[int], stride: list[int], offset: int) -> None:
    found = strided()[op](X, size, stride, offset)
    assert torch.equal(found, torch.as_strided(X, size, stride, offset))


@pytest.mark.parametrize(("size", "stride", "offset"), VIEWS)
def test_writes(size: list[int], stride: list[int], offset: int) -> None:
    op, source = aten.as_strided_scatter.default, -1.0 - torch.arange(prod(size)).view(size)
    found = strided()[op](X, source, size, stride, offset)
    assert torch.equal(found, op(X, source, size, stride, offset))


def test_an_offset_that_is_not_given_is_none() -> None:
    assert torch.equal(strided()[aten.as_strided.default](X, [3], [2]), X.flatten()[:6:2])


@pytest.mark.parametrize("x", [X.t(), X[1:]], ids=["turned", "a part"])
def test_tensors_that_lie_otherwise_are_left_to_others(x: torch.Tensor) -> None:
    table = strided()
    assert table[aten.as_strided.default](x, [2], [1]) is NotImplemented
    written = table[aten.as_strided_scatter.default](x, torch.ones(2), [2], [1])
    assert written is NotImplemented
