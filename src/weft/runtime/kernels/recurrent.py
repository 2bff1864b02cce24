"""`weft.lstm` and its backward (`weft.ops.rules.layers`) on local tensors.

oneDNN's kernel where PyTorch itself would take it: a CPU, float32 or bfloat16. For the backward it saves oneDNN's
workspace, a flat tensor whose size only oneDNN knows. Elsewhere the layer runs by torch's ops, with one product for
all inputs and one for each weight's gradient; gates and cells are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
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
        found: tuple[Tensor, ...] = _aten.mkldnn_rnn_layer.default(*given, reverse, [], *sizes)
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
    found = _aten.mkldnn_rnn_layer_backward.default(*given, *made, reverse, *sizes, saved)
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
