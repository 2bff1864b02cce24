"""LSTMs layer by layer: `weft.lstm` in place of the ops of every time step.

Eager PyTorch runs a layer as one kernel of the machine's (oneDNN, cuDNN), which knows nothing of
layouts; taken apart, a layer is some twenty calls for each time step. So a layer is recorded as one
op of weft's own (`weft.ops.rules.layers`). Layers that this op does not cover keep PyTorch's decomposition:
projections, and layers of which a strategy splits a weight. Packed sequences: `packed.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from weft.capture.ops.packed import packed_call
from weft.ops.rules.layers import saved_bytes

_FUSED = (torch.float32, torch.bfloat16)


@final
class LayersKept(TorchFunctionMode):
    """While this lasts, `torch.lstm` records one op for each layer and direction.

    Args:
        apart: weights whose layers are taken apart.

    Attributes:
        seen: the ids of all weights of layers, kept or taken apart.
    """

    def __init__(self, apart: Collection[Tensor]) -> None:
        super().__init__()
        self._apart = {id(weight) for weight in apart}
        self.seen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.lstm and not kwargs and self._keeps(args):
            return _lstm(*args)
        found = packed_call(func, args, self._layer)
        return func(*args, **(kwargs or {})) if found is NotImplemented else found

    def _layer(self, x: Tensor, first: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        states = [state.unsqueeze(0) for state in first]
        args: Any = (x, states, list(weights), len(weights) == 4, 1, 0.0, False, False, False)
        return _lstm(*args)[0] if self._keeps(args) else torch.lstm(*args)[0]

    def _keeps(self, args: Sequence[Any]) -> bool:
        """True where these are the arguments of layers without projections, on a batch that is not packed."""
        if len(args) != 9 or not isinstance(args[1], list | tuple):
            return False
        x, first, weights, has_biases, layers, _, _, bidirectional, batch_first = args
        count = layers * (1 + bidirectional)
        if len(first) != 2 or len(weights) != count * (4 if has_biases else 2):
            return False  # with projections there are more weights
        self.seen.update(map(id, weights))
        if any(id(weight) in self._apart for weight in weights):
            return False
        alike = (
            len({x.dtype, *(y.dtype for y in (*first, *weights))}) == 1 or _cast_to(x) is not None
        )
        batch = x.shape[0 if batch_first else 1] if x.dim() == 3 else -1
        states = {(count, batch, weights[1].shape[1])}
        return alike and x.numel() > 0 and {tuple(state.shape) for state in first} == states


def _cast_to(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast casts the operands of a layer to, as it does for the kernels of eager PyTorch."""
    kind = x.device.type
    casts = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if casts else None


def _lstm(
    x: Tensor,
    first: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = _cast_to(x) or x.dtype
    states, cells = (one.to(dtype).unbind(0) for one in first)
    weights = [weight.to(dtype) for weight in weights]
    x = x.to(dtype).transpose(0, 1).contiguous() if batch_first else x.to(dtype).contiguous()
    directions, each = 1 + bidirectional, 4 if has_biases else 2
    last: list[tuple[Tensor, Tensor]] = []
    for layer in range(layers):
        made = []
        for reverse in range(directions):
            number = layer * directions + reverse
            own = [*weights[number * each : (number + 1) * each], None, None][:4]
            out, *ends = _layer(x, own, states[number], cells[number], bool(reverse))
            made.append(out)
            last.append((ends[0], ends[1]))
        x = made[0] if len(made) == 1 else torch.cat(made, -1)
        if dropout and training and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    x = x.transpose(0, 1) if batch_first else x
    return x, torch.stack([state for state, _ in last]), torch.stack([cell for _, cell in last])


def _layer(
    x: Tensor, weights: Sequence[Tensor | None], state: Tensor, cell: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    trained = [y for y in (x, *weights, state, cell) if y is not None and y.requires_grad]
    follows = torch.is_grad_enabled() and bool(trained)
    out, last, last_cell, _ = torch.ops.weft.lstm(x, *weights, state, cell, reverse, follows)
    return out, last, last_cell


_LAYER = "Tensor x, Tensor w_ih, Tensor w_hh, Tensor? b_ih, Tensor? b_hh, Tensor h, Tensor c"
torch.library.define(
    "weft::lstm",
    f"({_LAYER}, bool reverse, bool train) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "weft::lstm_backward",
    f"(Tensor? g_out, Tensor? g_h, Tensor? g_c, {_LAYER}, Tensor out, Tensor last, Tensor last_cell, "
    "Tensor saved, bool reverse) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _made(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, _, w_hh, _, _, h, c, _, train = given
    steps, batch, inputs = x.shape
    hidden = w_hh.shape[1]
    fused = x.device.type == "cpu" and x.dtype in _FUSED
    dtype = str(x.dtype).removeprefix("torch.")
    width = saved_bytes(steps, inputs, hidden, dtype, fused) if train else 0
    saved = x.new_empty((batch, width), dtype=torch.uint8)
    return x.new_empty(steps, batch, hidden), torch.empty_like(h), torch.empty_like(c), saved


def _gradients(*given: Any) -> tuple[Tensor, ...]:
    x, w_ih, w_hh, _, _, h, c = given[3:10]
    return tuple(y.new_empty(y.shape) for y in (x, w_ih, w_hh, w_hh[:, 0], w_hh[:, 0], h, c))


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.reverse, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    given = (*gradients[:3], *ctx.saved_tensors, ctx.reverse)
    found = torch.ops.weft.lstm_backward(*given)
    needed = zip(found, ctx.needs_input_grad, strict=False)
    return (*(gradient if needs else None for gradient, needs in needed), None, None)


torch.library.register_fake("weft::lstm", _made)
torch.library.register_fake("weft::lstm_backward", _gradients)
torch.library.register_autograd("weft::lstm", _backward, setup_context=_keep)
