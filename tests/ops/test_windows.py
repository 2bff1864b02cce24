"""Convolutions and poolings split along space: windows and local ops against the whole op."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tools.oracles.rules import describe, torch_call
from weft.layout import Partial, Split, shard_range
from weft.ops import OpCall, localize, signatures, windows
from weft.ops.windows import Frame, window_signatures
from weft.runtime.kernels.window_ops import WINDOW_OPS
from weft.runtime.torch_ops import to_torch

GENERATOR = torch.Generator().manual_seed(0)


def draw(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def convolution(space, kernel, stride, padding, dilation, groups=1, bias=True):
    """Forward and backward of a convolution of 4 to 6 channels."""
    n = len(space)
    x, weight = draw(2, 4, *space), draw(6, 4 // groups, *kernel)
    settings = (stride, padding, dilation, False, [0] * n, groups)
    forward = torch_call(
        "aten.convolution.default", x, weight, draw(6) if bias else None, *settings
    )
    out = torch.ops.aten.convolution.default(x, weight, None, *settings)
    grad = draw(*out.shape)
    masks = [[True, True, bias], [True, False, False], [False, True, bias]]
    backward = [
        torch_call("aten.convolution_backward.default", grad, x, weight, [6], *settings, mask)
        for mask in masks
    ]
    return [forward, *backward]


def max_pool(shape, kernel, stride, padding, dilation=1, ceil=False):
    x = draw(*shape)
    arguments = (kernel, stride, padding, dilation, ceil)
    out, indices = torch.ops.aten.max_pool2d_with_indices.default(x, *arguments)
    name = "aten.max_pool2d_with_indices"
    return [
        torch_call(f"{name}.default", x, *arguments),
        torch_call(f"{name}_backward.default", draw(*out.shape), x, *arguments, indices),
    ]


def integer_pool(shape, *arguments):
    """Negative sums too, which are rounded towards zero."""
    x = draw(*shape).mul(50).long()
    return [torch_call("aten.avg_pool2d.default", x, *arguments, False, True, None)]


def avg_pool(shape, kernel, stride, padding, ceil=False, include=True, divisor=None):
    x = draw(*shape)
    arguments = (kernel, stride, padding, ceil, include, divisor)
    out = torch.ops.aten.avg_pool2d.default(x, *arguments)
    return [
        torch_call("aten.avg_pool2d.default", x, *arguments),
        torch_call("aten.avg_pool2d_backward.default", draw(*out.shape), x, *arguments),
    ]


SAMPLES = {
    "3x3": convolution([8, 7], [3, 3], [1, 1], [1, 1], [1, 1]),
    "strides": convolution([13, 9], [3, 3], [2, 3], [1, 0], [1, 1]),
    "far": convolution([11, 6], [5, 1], [1, 1], [4, 0], [2, 1], bias=False),
    "gaps": convolution([13, 8], [1, 2], [3, 3], [0, 0], [1, 1]),
    "even": convolution([9, 8], [4, 2], [2, 2], [1, 0], [1, 1]),
    "grouped": convolution([8, 8], [3, 3], [1, 1], [1, 1], [1, 1], groups=2),
    "1d": convolution([17], [5], [2], [2], [1]),
    "3d": convolution([6, 5, 4], [3, 3, 2], [1, 2, 1], [1, 1, 0], [1, 1, 1]),
    "max": max_pool([2, 3, 8, 8], [2, 2], [2, 2], 0),
    "max overlapping": max_pool([2, 3, 11, 9], [3, 3], [2, 2], [1, 1]),
    "max dilated": max_pool([3, 11, 13], [3, 2], [1, 2], [1, 0], [2, 3]),
    "max ceil": max_pool([2, 3, 10, 9], [3, 3], [2, 2], [1, 1], 1, True),
    "avg": avg_pool([2, 3, 9, 8], [2, 2], [2, 2], 0),
    "avg overlapping": avg_pool([2, 3, 11, 9], [3, 3], [2, 1], [1, 1]),
    "avg of integers": integer_pool([2, 3, 9, 8], [3, 2], [2, 1], [1, 1]),
    "avg ceil": avg_pool([2, 3, 10, 12], [3, 3], [2, 2], [1, 1], True),
    "avg of what is there": avg_pool([3, 10, 12], [3, 3], [2, 2], [1, 1], True, False),
    "avg divisor": avg_pool([2, 3, 10, 12], [3, 2], [2, 2], [1, 0], False, True, 5),
}
CALLS = [(name, call) for name, calls in SAMPLES.items() for call in calls]


def run(call: OpCall, tensors):
    args = to_torch(call.args, tensors)
    found = WINDOW_OPS[call.op](*args)
    return found if isinstance(found, tuple) else (found,)


def pieces(call, signature, parts, index, tensors):
    """What rank `index` reads of the operands."""
    given = []
    for sbp, window, tensor in zip(
        signature.operands, windows(call, signature, parts, index), tensors, strict=True
    ):
        if window is not None:
            tensor = tensor.narrow(*window)
        elif isinstance(sbp, Split):
            tensor = tensor.narrow(sbp.dim, *shard_range(tensor.shape[sbp.dim], parts, index))
        elif isinstance(sbp, Partial):
            tensor = tensor * (index == 0)
        given.append(tensor)
    return given


def joined(results, sbp):
    if isinstance(sbp, Split):
        return torch.cat(results, sbp.dim)
    return sum(results) if isinstance(sbp, Partial) else results[0]


@pytest.mark.parametrize(("name", "sample"), CALLS, ids=[name for name, _ in CALLS])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_windows_give_what_the_whole_op_gives(name, sample, parts):
    call, tensors, expected = describe(sample)
    found = window_signatures(call, parts)
    assert found
    for signature in found:
        outcomes = []
        for index in range(parts):
            local = localize(call, signature, parts, index)
            given = pieces(call, signature, parts, index, tensors)
            assert [spec.shape for spec in local.operands] == [tuple(t.shape) for t in given]
            results = run(local, given)
            assert [s and s.shape for s in local.results] == [
                None if r is None else tuple(r.shape) for r in results
            ]
            outcomes.append(results)
        for number, whole in enumerate(expected):
            if whole is not None:
                made = joined([each[number] for each in outcomes], signature.results[number])
                torch.testing.assert_close(made, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["3x3", "strides", "max overlapping", "avg overlapping"])
def test_height_and_width_on_two_axes(name):
    for sample in SAMPLES[name]:
        call, tensors, expected = describe(sample)
        dims = range(len(call.operands[0].shape) - 2, len(call.operands[0].shape))
        outer, inner = window_signatures(call, 2)
        assert [s.operands[0] for s in (outer, inner)] == [Split(dim) for dim in dims]
        columns = []
        for i, j in product(range(2), range(2)):
            half = localize(call, outer, 2, i)
            given = pieces(call, outer, 2, i, tensors)
            local = localize(half, inner, 2, j)
            assert inner in window_signatures(half, 2)
            assert outer not in window_signatures(half, 2)
            columns.append(run(local, pieces(half, inner, 2, j, given)))
        for number, whole in enumerate(expected):
            if whole is None:
                continue
            halves = [
                joined([one[number] for one in columns[at : at + 2]], inner.results[number])
                for at in (0, 2)
            ]
            made = joined(halves, outer.results[number])
            torch.testing.assert_close(made, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["3x3", "grouped", "max overlapping", "avg ceil"])
def test_windows_are_split_along_other_dimensions_too(name):
    """Height on the outer axis, then all that the rule of the local op allows on the inner one."""
    for sample in SAMPLES[name]:
        call, tensors, expected = describe(sample)
        outer = window_signatures(call, 2)[0]
        halves = []
        for i in range(2):
            half = localize(call, outer, 2, i)
            given = pieces(call, outer, 2, i, tensors)
            whole = run(half, given)
            splits = [
                s for s in signatures(half, 2) if any(isinstance(o, Split) for o in s.operands)
            ]
            assert len(splits) >= 2
            for inner in splits:
                made = [
                    run(localize(half, inner, 2, j), pieces(half, inner, 2, j, given))
                    for j in range(2)
                ]
                for number, result in enumerate(whole):
                    if result is not None:
                        found = joined([one[number] for one in made], inner.results[number])
                        torch.testing.assert_close(found, result, rtol=1e-12, atol=1e-12)
            halves.append(whole)
        for number, result in enumerate(expected):
            if result is not None:
                made = joined([one[number] for one in halves], outer.results[number])
                torch.testing.assert_close(made, result, rtol=1e-12, atol=1e-12)


def test_halos_are_as_small_as_they_can_be():
    """3 rows, stride 1, padding 1: one border row on each side; 2 rows, stride 2: none."""
    frame = Frame(12, 12, 3, 1, 1, 1, 4, 4, 4, 4)
    assert frame.read == (3, 6)
    assert frame.around == (0, 0)
    assert frame.returned == (3, 6)
    first = Frame(12, 12, 3, 1, 1, 1, 0, 4, 0, 4)
    assert (first.read, first.around) == ((0, 5), (1, 0))
    halved = Frame(12, 6, 2, 2, 0, 1, 2, 2, 4, 4)
    assert (halved.read, halved.returned) == ((4, 4), (2, 2))


def test_what_does_not_slide_has_no_windows():
    x, weight = draw(1, 2, 8, 8), draw(2, 2, 3, 3)
    transposed = torch_call(
        "aten.convolution.default", x, weight, None, [1, 1], [1, 1], [1, 1], True, [0, 0], 1
    )
    assert window_signatures(describe(transposed)[0], 2) == ()
    # An output that sees padding only would need no rows at all.
    padded = torch_call(
        "aten.convolution.default", x, weight, None, [1, 1], [3, 1], [1, 1], False, [0, 0], 1
    )
    assert [s.operands[0] for s in window_signatures(describe(padded)[0], 2)] == [Split(3)]
