"""Convolutions and poolings on windows (`weft.ops.windows`): a rank's rows of the result of the whole op.

Each op takes the arguments of the ATen op that it stands for, with windows in place of tensors that are cut, and then
the frames of the last dimensions. Windows are padded here at the outer ends of the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from weft.ops.windows import Frame, Frames
from weft.runtime.kernels import dense_operands

aten = torch.ops.aten


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    frames: Any,
) -> Tensor:
    """`aten.convolution`: x is cut to the rows that the rank's outputs read."""
    sliding = _frames(frames)
    padded, rest = _padded(x, sliding, 0, cut=True), _rest(sliding)
    settings = (stride, rest, dilation, transposed, output_padding, groups)
    return dense_operands.convolution(padded, weight, bias, *settings)


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
    frames: Any,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """`aten.convolution_backward`: the rank's rows of the input's gradient, its share of the others'.

    `grad` is cut to the rows that the rank's rows of the input went into, its own rows among them;
    the shares come from its own rows alone, so that they add up.
    """
    sliding = _frames(frames)
    rest = _rest(sliding)
    to_input, to_weight, to_bias = output_mask
    settings = (stride, rest, dilation, transposed, output_padding, groups)
    first: Tensor | None = None
    if to_input:
        reach = _reach(grad, sliding)
        # Only the shape of the input matters to its gradient.
        like = grad.new_empty(()).expand(x.shape[0], x.shape[1], *reach)
        whole = dense_operands.convolution_backward(
            grad, like, weight, None, *settings, [True, False, False]
        )[0]
        starts = [_start(frame) if frame.cut else 0 for frame in sliding]
        assert whole is not None  # the mask asks for it
        first = _placed(whole, starts, sliding)
    if not (to_weight or to_bias):
        return first, None, None
    own = _own(grad, sliding) if to_input else grad
    if not to_weight:  # the kernel would ask for a window of x, which nothing else needs
        return first, None, own.sum([0, *range(2, own.dim())])
    _, second, third = dense_operands.convolution_backward(
        own, _padded(x, sliding, 0, cut=True), weight, bias_sizes, *settings, [False, True, to_bias]
    )
    return first, second, third


def max_pool2d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    frames: Any,
) -> tuple[Tensor, Tensor]:
    """`aten.max_pool2d_with_indices`: x is cut to the rows that the rank's outputs read; indices are global."""
    sliding = _frames(frames)
    lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    padded = _padded(x, sliding, lowest)
    found, at = aten.max_pool2d_with_indices.default(padded, kernel, stride, 0, dilation, False)
    width = padded.shape[-1]
    row, column = (
        (place + frame.read[0] - frame.around[0]).clamp_(0, frame.size - 1)
        for place, frame in zip((at // width, at % width), sliding, strict=True)
    )
    return found, row.mul_(sliding[1].size).add_(column)


def max_pool2d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Tensor,
    frames: Any,
) -> Tensor:
    """`aten.max_pool2d_with_indices_backward`: gradients go where their indices say, within the rank's rows."""
    rows, columns = _frames(frames)
    row = indices // columns.size - rows.in_first
    column = indices % columns.size - columns.in_first
    outside = (row < 0) | (row >= rows.in_count) | (column < 0) | (column >= columns.in_count)
    at = (row * columns.in_count + column).masked_fill_(outside, 0)
    plane = grad.new_zeros((*grad.shape[:-2], rows.in_count * columns.in_count))
    plane.scatter_add_(-1, at.flatten(-2), grad.masked_fill(outside, 0).flatten(-2))
    return plane.view(*grad.shape[:-2], rows.in_count, columns.in_count)


def avg_pool2d(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
    frames: Any,
) -> Tensor:
    """`aten.avg_pool2d`: x is cut to the rows that the rank's outputs read."""
    sliding = _frames(frames)
    padded = _padded(x, sliding, 0)
    sums: Tensor = aten.avg_pool2d.default(padded, kernel, stride, 0, False, True, 1)
    owned = tuple((frame.out_first, frame.out_count) for frame in sliding)
    counts = divisor or _counts(sliding, owned, count_include_pad, x.dtype, x.device)
    return torch.div(sums, counts, rounding_mode=None if x.is_floating_point() else "trunc")


def avg_pool2d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
    frames: Any,
) -> Tensor:
    """`aten.avg_pool2d_backward`: `grad` is cut to the rows that the rank's rows of the input went into."""
    sliding = _frames(frames)
    cut = tuple(frame.returned for frame in sliding)
    shares = grad / (divisor or _counts(sliding, cut, count_include_pad, grad.dtype, grad.device))
    reach = [_span(n, frame) for n, frame in zip(grad.shape[-2:], sliding, strict=True)]
    like = grad.new_empty(()).expand(*grad.shape[:-2], *reach)
    whole = aten.avg_pool2d_backward.default(shares, like, kernel, stride, 0, False, True, 1)
    return _placed(whole, [_start(frame) for frame in sliding], sliding)


def _frames(numbers: Sequence[Sequence[int]]) -> Frames:
    return tuple(Frame(*each) for each in numbers)


def _rest(frames: Frames) -> list[int]:
    return [0 if frame.cut else frame.padding for frame in frames]


def _reach(grad: Tensor, frames: Frames) -> list[int]:
    """Sizes of the input that a window of outputs reads, without padding where it is cut."""
    sizes = zip(grad.shape[grad.dim() - len(frames) :], frames, strict=True)
    return [_span(n, frame) if frame.cut else frame.size for n, frame in sizes]


def _span(count: int, frame: Frame) -> int:
    return (count - 1) * frame.stride + frame.extent


def _start(frame: Frame) -> int:
    """The first row of the input of a window of outputs, counted from the rank's first row of the input."""
    return frame.returned[0] * frame.stride - frame.padding - frame.in_first


def _padded(x: Tensor, frames: Frames, value: float, cut: bool = False) -> Tensor:
    """The window with its padding, or only that where it is `cut`; torch counts dimensions from the last."""
    around = [rows for f in reversed(frames) for rows in (f.around if f.cut or not cut else (0, 0))]
    return torch.constant_pad_nd(x, around, value) if any(around) else x


def _own(grad: Tensor, frames: Frames) -> Tensor:
    for dim, frame in enumerate(frames, grad.dim() - len(frames)):
        grad = grad.narrow(dim, frame.out_first - frame.returned[0], frame.out_count)
    return grad


def _placed(whole: Tensor, starts: Sequence[int], frames: Frames) -> Tensor:
    """Put the rows that outputs read, from `starts` on, in their places among the rank's rows; others are zero."""
    space = zip(starts, frames, strict=True)
    for dim, (start, frame) in enumerate(space, whole.dim() - len(frames)):
        first, end = max(start, 0), min(start + whole.shape[dim], frame.in_count)
        made = whole.narrow(dim, first - start, end - first) if first < end else None
        if made is not None and end - first == frame.in_count:
            whole = made
            continue
        shape = [*whole.shape[:dim], frame.in_count, *whole.shape[dim + 1 :]]
        filled = whole.new_zeros(shape)
        if made is not None:
            filled.narrow(dim, first, end - first).copy_(made)
        whole = filled
    return whole.contiguous()


@lru_cache(maxsize=256)
def _counts(
    frames: Frames,
    outputs: tuple[tuple[int, int], ...],
    with_padding: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The number of elements that each output of a window averages; shape [rows, columns]."""
    rows, columns = (
        [_count(frame, out, with_padding) for out in range(first, first + count)]
        for frame, (first, count) in zip(frames, outputs, strict=True)
    )
    return torch.outer(
        *(torch.tensor(side, dtype=dtype, device=device) for side in (rows, columns))
    )


def _count(frame: Frame, out: int, with_padding: bool) -> int:
    start = out * frame.stride - frame.padding
    end = min(start + frame.kernel, frame.size + frame.padding)
    return end - start if with_padding else min(end, frame.size) - max(start, 0)


WINDOW_OPS: dict[str, Callable[..., Any]] = {
    "weft.convolution": convolution,
    "weft.convolution_backward": convolution_backward,
    "weft.max_pool2d_with_indices": max_pool2d,
    "weft.max_pool2d_with_indices_backward": max_pool2d_backward,
    "weft.avg_pool2d": avg_pool2d,
    "weft.avg_pool2d_backward": avg_pool2d_backward,
}
