"""weft's ops of a BatchNorm whose batch is split over ranks, on fused kernels of torch.

Two of these kernels are slow on a CPU, and go another way to the same numbers, also where the batch
is whole (`weft.compiler.plans.specialize` says where): the one that collects statistics of contiguous
images adds up element by element, and the backward works on each image of each channel alone, however small it is.

Moments are added up in float64: the sum of squares of float32 data loses nothing by it, however
far the mean lies from zero, and the ranks exchange one small tensor. (Of float64 data, the variance
keeps 16 digits less twice those of mean / deviation.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.ops.rules.layers import FEW_POSITIONS, MANY_POSITIONS
from weft.ops.weft_ops import ELEMENTS_AT_A_TIME
from weft.runtime.kernels.dense_operands import dense_op

aten = torch.ops.aten
_BACKWARD = dense_op("aten.native_batch_norm_backward.default")
_HALF = (torch.float16, torch.bfloat16)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor | None, ...]:
    """`aten._native_batch_norm_legit_functional` in training."""
    settings = (x.numel() // x.shape[1], momentum, eps, x.dtype)
    moments = batch_moments(x)
    var, mean, *others = batch_statistics(moments, running_mean, running_var, *settings)
    found = aten.native_batch_norm.default(x, weight, bias, mean, var, False, 0.0, eps)
    return found[0], mean, *others


def batch_norm_backward(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    """`aten.native_batch_norm_backward` in training."""
    first, *others = _BACKWARD(*_channels_last(grad, x), *rest)  # copies are gone when it is done
    return _as(x, first), *others


def _channels_last(*tensors: Tensor) -> tuple[Tensor, ...]:
    x = tensors[-1]
    small = x.dim() == 4 and 1 < x.shape[2] * x.shape[3] < FEW_POSITIONS
    if not small or x.device.type != "cpu":
        return tensors
    return tuple(one.contiguous(memory_format=torch.channels_last) for one in tensors)


def _as(x: Tensor, made: Tensor) -> Tensor:
    return made.contiguous() if x.is_contiguous() else made


def batch_moments(x: Tensor) -> Tensor:
    """`weft.batch_moments`: sum and sum of squares of this rank's part of each channel, [2, C], float64."""
    if x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous():
        positions = x.numel() // max(1, x.shape[0] * x.shape[1])
        if positions >= MANY_POSITIONS:
            return _moments_of_images(x, positions)
    # For half precision, the kernel makes float32 results only where it has running statistics.
    like = x.new_zeros((2, x.shape[1]), dtype=torch.float32).unbind() if x.dtype in _HALF else None
    mean, var = aten.batch_norm_update_stats.default(x, *(like or (None, None)), 0.0)
    moments = x.new_empty((2, x.shape[1]), dtype=torch.float64)
    total, squares = moments.unbind()
    total.copy_(mean)
    torch.addcmul(var, total, total, out=squares)
    return moments.mul_(x.numel() // max(1, x.shape[1]))


def _moments_of_images(x: Tensor, positions: int) -> Tensor:
    c = x.shape[1]
    sums = x.new_zeros((2, c), dtype=torch.float64)
    # The kernel makes a normalized copy, which nobody wants: of a few images at a time.
    for some in torch.split(x, max(1, ELEMENTS_AT_A_TIME // max(1, c * positions))):
        sizes = (len(some), c, positions, c)
        mean, rstd = aten.native_group_norm.default(some, None, None, *sizes, 0.0)[1:]
        total = mean.double()
        squares = rstd.double().pow_(-2).addcmul_(total, total)
        sums += torch.stack((total, squares)).sum(1)
    return sums.mul_(positions)


def batch_statistics(
    moments: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    count: int,
    momentum: float,
    eps: float,
    dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """`weft.batch_statistics`: what BatchNorm makes of the moments of the whole batch.

    Args:
        moments: [2, C], float64.
        count: elements of each channel.
        dtype: of the results that are not running statistics.

    Returns:
        Variance, mean, 1 / sqrt(variance + eps) and the new running statistics, each [C].
    """
    mean, squares = (moments / count).unbind()
    var = torch.addcmul(squares, mean, mean, value=-1).clamp_min_(0)
    statistics = var.to(dtype), mean.to(dtype), (var + eps).rsqrt_().to(dtype)
    if running_mean is None or running_var is None:
        return (*statistics, None, None)
    unbiased = var * (count / (count - 1))
    new = zip((running_mean, running_var), (mean, unbiased), strict=True)
    return (*statistics, *(torch.lerp(old, one.to(old.dtype), momentum) for old, one in new))


def batch_norm_sums(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """`weft.batch_norm_sums`: this rank's part of the gradients of weight and bias, [2, C].

    Args:
        grad: of the result, [n, C, ...].
        mean: of the whole batch, [C].
        rstd: 1 / sqrt(variance + eps) of the whole batch, [C].
    """
    mask = [False, True, True]
    _, to_weight, to_bias = _BACKWARD(
        *_channels_last(grad, x), None, None, None, mean, rstd, True, 0.0, mask
    )
    return torch.stack((to_weight, to_bias))


def batch_norm_gradient(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    sums: Tensor,
    count: int,
) -> Tensor:
    """`weft.batch_norm_gradient`: the gradient of this rank's part of `x`; see `batch_norm_sums`.

    With n(x) = (x - mean) * rstd it is weight * rstd * (grad - sum(grad) / count - n(x) *
    sum(grad * n(x)) / count): a scaled `grad`, and a linear function of x, each of them one pass of
    a kernel that normalizes with given statistics.

    Args:
        weight: [C], or None for ones.
        sums: gradients of weight and bias, of the whole batch, [2, C].
        count: elements of each channel in the whole batch.
    """
    scale = rstd if weight is None else rstd * weight
    slope, shift = torch.mul(sums, scale).div_(-count).unbind()
    # Given statistics of variance 1, both kernels multiply by their `weight` alone.
    zero, one = torch.zeros_like(mean), torch.ones_like(mean)
    given, read = _channels_last(grad, x)
    found = aten.native_batch_norm.default(
        read, slope.mul_(rstd), shift, mean, one, False, 0.0, 0.0
    )[0]
    mask = [True, False, False]
    scaled = _BACKWARD(given, read, scale, zero, one, None, None, False, 0.0, mask)[0].add_(found)
    del given, read, found
    return _as(x, scaled)


NORM_OPS: dict[str, Callable[..., Any]] = {
    "weft.batch_norm": batch_norm,
    "weft.batch_norm_backward": batch_norm_backward,
    "weft.batch_moments": batch_moments,
    "weft.batch_statistics": batch_statistics,
    "weft.batch_norm_sums": batch_norm_sums,
    "weft.batch_norm_gradient": batch_norm_gradient,
}


# `weft.lstm` and its backward (`weft.ops.rules.layers`) on local tensors.
#
# oneDNN's kernel where PyTorch itself would take it: a CPU, float32 or bfloat16. For the backward it saves oneDNN's
# workspace, a flat tensor whose size only oneDNN knows. Elsewhere the layer runs by torch's ops, with one product for
# all inputs and one for each weight's gradient; gates and cells are saved.


_MODE = 2  # oneDNN's number of an LSTM


def lstm(
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    h: Tensor,
    c: Tensor,
    reverse: bool,
    train: bool,
) -> tuple[Tensor, ...]:
    """`weft.lstm`: all states [time, n, hidden], last state and cell [n, hidden], what is saved."""
    if not _has_kernel(x):
        return _steps_forward(x, (w_ih, w_hh), (b_ih, b_hh), (h, c), reverse, train)
    given = _as_kernels_take(x, (w_ih, w_hh), (b_ih, b_hh), (h, c))
    sizes = (_MODE, w_hh.shape[1], 1, b_ih is not None, False, False, train)
    # The kernel saves what a backward needs where gradients are recorded.
    with torch.set_grad_enabled(train):
        found: tuple[Tensor, ...] = aten.mkldnn_rnn_layer.default(*given, reverse, [], *sizes)
    # Without a backward there is no workspace.
    return found if train else (*found[:3], x.new_empty((x.shape[1], 0), dtype=torch.uint8))


def lstm_backward(
    g_out: Tensor | None,
    g_h: Tensor | None,
    g_c: Tensor | None,
    x: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    h: Tensor,
    c: Tensor,
    out: Tensor,
    last: Tensor,
    last_cell: Tensor,
    saved: Tensor,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """`weft.lstm_backward`: gradients of input, weights, biases, first state and first cell."""
    if saved.dim() == 2:
        gradients = (g_out, g_h, g_c)
        return _steps_backward(gradients, x, (w_ih, w_hh), (h, c), out, saved, reverse)
    given = _as_kernels_take(x, (w_ih, w_hh), (b_ih, b_hh), (h, c))
    made = (*(y.contiguous() for y in (out, last, last_cell)), g_out, g_h, g_c)
    sizes: tuple[Any, ...] = (_MODE, w_hh.shape[1], 1, b_ih is not None, True, False, [], False)
    found = aten.mkldnn_rnn_layer_backward.default(*given, *made, reverse, *sizes, saved)
    # All are float32 whatever the input is.
    return tuple(gradient.to(x.dtype) for gradient in found)


def _as_kernels_take(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    first: tuple[Tensor, Tensor],
) -> list[Tensor]:
    """The operands; they read input and states as if they were contiguous, and always some biases."""
    own = [x.new_empty(0) if bias is None else bias for bias in biases]
    return [x.contiguous(), *weights, *own, *(state.contiguous() for state in first)]


def _has_kernel(x: Tensor) -> bool:
    if x.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if x.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return x.dtype == torch.float32


def _times(steps: int, reverse: bool) -> list[int]:
    return list(range(steps))[:: -1 if reverse else 1]


def _steps_forward(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    first: tuple[Tensor, Tensor],
    reverse: bool,
    train: bool,
) -> tuple[Tensor, ...]:
    steps, batch, _ = x.shape
    w_hh, (h, c) = weights[1].t(), first
    hidden = w_hh.shape[0]
    bias = None if biases[0] is None or biases[1] is None else biases[0] + biases[1]
    projected = torch.nn.functional.linear(x, weights[0], bias)
    out = x.new_empty(steps, batch, hidden)
    saved = x.new_empty(batch, steps if train else 0, 5 * hidden)
    for time in _times(steps, reverse):
        gates = torch.addmm(projected[time], h, w_hh)
        gates[:, : 2 * hidden].sigmoid_()
        gates[:, 2 * hidden : 3 * hidden].tanh_()
        gates[:, 3 * hidden :].sigmoid_()
        enters, stays, new, leaves = gates.chunk(4, 1)
        c = torch.addcmul(stays * c, enters, new)
        h = torch.mul(leaves, c.tanh(), out=out[time])
        if train:
            torch.cat([gates, c], 1, out=saved[:, time])
    return out, h.clone(), c, saved.flatten(1).view(torch.uint8)


def _steps_backward(
    given: Sequence[Tensor | None],
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    first: tuple[Tensor, Tensor],
    out: Tensor,
    saved: Tensor,
    reverse: bool,
) -> tuple[Tensor, ...]:
    steps, batch, hidden = out.shape
    (g_out, g_h, g_c), (w_ih, w_hh) = given, weights
    kept = saved.contiguous().view(x.dtype).view(batch, steps, 5, hidden)
    g_h = torch.zeros_like(first[0]) if g_h is None else g_h
    g_c = torch.zeros_like(first[1]) if g_c is None else g_c
    g_gates = x.new_empty(steps, batch, 4 * hidden)
    times = _times(steps, reverse)
    for place in reversed(range(steps)):
        time = times[place]
        before = kept[:, times[place - 1], 4] if place else first[1]
        g_h = g_h if g_out is None else g_h + g_out[time]
        g_c = _gates_backward(kept[:, time].unbind(1), before, g_h, g_c, g_gates[time])
        g_h = g_gates[time] @ w_hh
    states = (out[1:], first[0][None]) if reverse else (first[0][None], out[:-1])
    flat = g_gates.flatten(0, 1)
    of_states = flat.t() @ torch.cat(states).flatten(0, 1)
    g_x = (flat @ w_ih).view(x.shape)
    bias = flat.sum(0)
    return g_x, flat.t() @ x.flatten(0, 1), of_states, bias, bias.clone(), g_h, g_c


def _gates_backward(
    kept: Sequence[Tensor], before: Tensor, g_h: Tensor, g_c: Tensor, g_gates: Tensor
) -> Tensor:
    """Write the gradients of one step's gates [n, 4·hidden]; the gradient of the cell `before`."""
    enters, stays, new, leaves, cell = kept
    bent = cell.tanh()
    g_c = torch.addcmul(g_c, g_h * leaves, 1 - bent * bent)
    torch.cat(
        [
            g_c * new * enters * (1 - enters),
            g_c * before * stays * (1 - stays),
            g_c * enters * (1 - new * new),
            g_h * bent * leaves * (1 - leaves),
        ],
        1,
        out=g_gates,
    )
    return g_c * stays


RECURRENT_OPS: dict[str, Callable[..., Any]] = {
    "weft.lstm": lstm,
    "weft.lstm_backward": lstm_backward,
}
