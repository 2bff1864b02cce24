"""LSTMs layer by layer: `weft.lstm` in place of the ops of every time step.

Eager PyTorch runs a layer as one kernel of the machine's (oneDNN, cuDNN), which knows no layouts; decomposed, a layer
is about twenty calls per time step. So a layer is recorded as one op of weft's own (`weft.ops.rules.layers`).
Projections, and layers with a weight that a strategy splits, use PyTorch's decomposition.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode

from weft.capture.fx.private import Refusal, shapes_of
from weft.capture.python.rewrites import require
from weft.ops.rules.layers import saved_bytes

_FUSED = (torch.float32, torch.bfloat16)


@final
class LayersKept(TorchFunctionMode):
    """Within the context, `torch.lstm` records one op for each layer and direction.

    Args:
        apart: weights whose layers are decomposed.

    Attributes:
        seen: the ids of all weights of layers, kept or decomposed.
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
        """True if these are the arguments of layers without projections, on a batch that is not packed."""
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


@shapes_of("weft::lstm")
def _made(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, _, w_hh, _, _, h, c, _, train = given
    steps, batch, inputs = x.shape
    hidden = w_hh.shape[1]
    fused = x.device.type == "cpu" and x.dtype in _FUSED
    dtype = str(x.dtype).removeprefix("torch.")
    width = saved_bytes(steps, inputs, hidden, dtype, fused) if train else 0
    saved = x.new_empty((batch, width), dtype=torch.uint8)
    return x.new_empty(steps, batch, hidden), torch.empty_like(h), torch.empty_like(c), saved


@shapes_of("weft::lstm_backward")
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


torch.library.register_autograd("weft::lstm", _backward, setup_context=_keep)


# Packed sequences (`torch.nn.utils.rnn`): padded sequences with their lengths, in the order of the batch.
#
# The number of elements of a packed sequence depends on lengths, which are values. So `pack_padded_sequence` gives a
# stand-in that holds the padded sequence. Recurrent layers run over all steps; steps after the end of a sequence reach
# no state that is given back and no result of `pad_packed_sequence`. The backward direction gets each sequence reversed
# within its length. Nothing is sorted: only the user's code could see the order.


F = torch.nn.functional
_RNNS: tuple[Any, ...] = (torch.gru, torch.rnn_tanh, torch.rnn_relu)
_PACK, _PAD = torch._pack_padded_sequence, torch._pad_packed_sequence
_READ = (
    "reads {} of a packed sequence, whose sizes depend on the lengths in the batch, but the graph is captured once, "
    "before any values exist; expected that it is only passed to nn.LSTM, GRU or RNN and to pad_packed_sequence: call "
    "that first, and mask what is after the ends"
)
# Runs one layer in one direction: x [time, n, in], first states [n, hidden] and weights, to all states.
_Layer = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]


class _StandIn:
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _INDEXED:
            return args[0]
        if func is torch.empty_like and isinstance(args[0], _Order):
            return args[0]
        raise Refusal(_READ.format(f"the elements ({getattr(func, '__name__', func)})"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Refusal(_READ.format(name))


# Calls that put a tensor into another order, which leave it as it is: the order stands for that of the batch itself.
_INDEXED = (torch.index_select, Tensor.index_select, Tensor.__getitem__)


@final
class _Order(_StandIn):
    """Stands for the indices by which sequences were sorted: they were not."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self._batch, self.device = batch, device

    def to(self, *_: Any, **__: Any) -> _Order:
        return self

    cpu = scatter_ = to

    def numel(self) -> int:
        return self._batch


@final
class _Sizes(_StandIn):
    """Stands for `batch_sizes`: the lengths [n] of padded sequences of so many steps."""

    def __init__(self, lengths: Tensor, steps: int) -> None:
        self.lengths, self.steps = lengths, steps
        self.device = torch.device("cpu")

    def size(self, dim: int) -> int:
        return self.steps

    def __getitem__(self, place: int) -> int:
        if place != 0:
            raise Refusal(_READ.format("batch_sizes"))
        return self.lengths.shape[0]

    @property
    def inside(self) -> Tensor:
        """True before the end of a sequence: [time, n, 1]."""
        times = torch.arange(self.steps, device=self.lengths.device)
        return (times.unsqueeze(1) < self.lengths.unsqueeze(0)).unsqueeze(2)

    @property
    def turned(self) -> Tensor:
        """The time of each element where every sequence is turned round within its length: [time, n, 1]."""
        times = torch.arange(self.steps, device=self.lengths.device).view(-1, 1, 1)
        return torch.where(self.inside, self.lengths.view(1, -1, 1) - 1 - times, times)


@final
class _Data(_StandIn):
    """Stands for the elements of a packed sequence: padded [time, n, ...]."""

    def __init__(self, padded: Tensor) -> None:
        self.padded = padded
        self.dtype, self.device = padded.dtype, padded.device

    def dim(self) -> int:
        return self.padded.dim() - 1

    def __getitem__(self, _: Any) -> Any:
        raise Refusal(_READ.format("the elements"))

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __truediv__ = __matmul__ = __getitem__

    def size(self, dim: int) -> int:
        if dim % self.dim() == 0:
            raise Refusal(_READ.format("the number of elements"))
        return self.padded.shape[dim % self.dim() + 1]


@final
@dataclass(frozen=True)
class _Layers:
    """Recurrent layers on a packed sequence, as the arguments of `torch.lstm` and the like say them.

    Attributes:
        weights: of all layers and directions, in torch's order.
        has_biases: true if two of four weights of each are biases.
    """

    first: Sequence[Tensor]
    weights: Sequence[Tensor]
    has_biases: bool
    layers: int
    dropout: float
    training: bool
    directions: int

    def run(
        self, data: _Data, sizes: _Sizes, layer: _Layer
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """All states [time, n, hidden], and for each layer and direction the last state, and the last cell if any."""
        x, each = data.padded, 4 if self.has_biases else 2
        last, cells = [], []
        for number in range(self.layers):
            made = []
            for direction in range(self.directions):
                place = number * self.directions + direction
                own = self.weights[place * each : (place + 1) * each]
                first = [state[place] for state in self.first]
                given = _picked(x, sizes.turned) if direction else x
                out = layer(given, first, own)
                last.append(_picked(out, (sizes.lengths - 1).view(1, -1, 1)).squeeze(0))
                if len(first) == 2:
                    cell = _last_cell(given, out, first, own, sizes.inside)
                    cells.append(cell.to(out.dtype))
                made.append(_picked(out, sizes.turned) if direction else out)
            x = made[0] if len(made) == 1 else torch.cat(made, -1)
            if self.dropout and self.training and number < self.layers - 1:
                x = torch.dropout(x, self.dropout, True)
        return x, last, cells


def packed_call(func: Any, args: Sequence[Any], lstm_layer: _Layer) -> Any:
    """The result of a function that packs, pads or runs layers; NotImplemented for all others.

    Args:
        lstm_layer: runs one layer of an LSTM.
    """
    if func is torch.sort and _variables_of(pack_padded_sequence.__code__) is not None:
        return args[0], _Order(args[0].shape[0], args[0].device)
    if func is _PACK:
        return _packed(*args)
    if func is _PAD and isinstance(args[0], _Data):
        return _padded(*args)
    if func not in (torch.lstm, *_RNNS) or not isinstance(args[0], _Data):
        return NotImplemented
    data, sizes, first, weights, *options, bidirectional = args
    if func is torch.lstm:
        layers = _layers_of(first, weights, options, bidirectional)
        out, last, cells = layers.run(data, sizes, lstm_layer)
        return _Data(out), torch.stack(last), torch.stack(cells)
    layers = _layers_of([first], weights, options, bidirectional)
    out, last, _ = layers.run(data, sizes, _plain_layer(func, layers.has_biases))
    return _Data(out), torch.stack(last)


def _layers_of(
    first: Sequence[Tensor], weights: Sequence[Tensor], options: Sequence[Any], bidirectional: bool
) -> _Layers:
    has_biases, layers, dropout, training = options
    directions = 1 + bidirectional
    if len(weights) != layers * directions * (4 if has_biases else 2):
        raise Refusal(
            "runs an LSTM with projections (proj_size=) over a packed sequence, which is not supported; expected one "
            "without, or padded sequences"
        )
    return _Layers(first, weights, has_biases, layers, dropout, training, directions)


def _plain_layer(func: Any, has_biases: bool) -> _Layer:
    def layer(x: Tensor, first: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
        state = first[0].unsqueeze(0)
        out: Tensor = func(x, state, list(weights), has_biases, 1, 0.0, False, False, False)[0]
        return out

    return layer


def _packed(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[_Data, _Sizes]:
    padded = x.transpose(0, 1) if batch_first else x
    steps, batch = padded.shape[:2]
    if tuple(lengths.shape) != (batch,):
        raise Refusal(
            f"packs {batch} sequences with lengths of shape {list(lengths.shape)}; expected one length for each"
        )
    lengths = lengths.to(padded.device)
    inside = ((lengths > 0) & (lengths <= steps)).all()
    require(inside, f"pack_padded_sequence: lengths must be from 1 to {steps}")
    caller = _variables_of(pack_padded_sequence.__code__)
    if caller is not None and caller.get("enforce_sorted") and batch > 1:
        falls = (lengths[:-1] >= lengths[1:]).all()
        require(falls, "pack_padded_sequence: with enforce_sorted=True, lengths must not grow")
    return _Data(padded), _Sizes(lengths, steps)


def _padded(
    data: _Data, sizes: _Sizes, batch_first: bool, padding: float, total: int
) -> tuple[Tensor, Tensor]:
    x = data.padded
    inside = sizes.inside.view(*sizes.inside.shape[:2], *[1] * (x.dim() - 2))
    out = torch.where(inside, x, torch.full((), padding, dtype=x.dtype, device=x.device))
    if total > sizes.steps:
        more = out.new_full((total - sizes.steps, *out.shape[1:]), padding)
        out = torch.cat([out, more])
    caller = _variables_of(pad_packed_sequence.__code__)
    if caller is not None and caller.get("total_length") is None:
        require(
            sizes.lengths.max() == sizes.steps,
            f"pad_packed_sequence: the longest sequence has less than the {sizes.steps} steps of the padded ones, and "
            f"the result would be shorter than in other steps; pass total_length={sizes.steps}, or cut the batch "
            "before",
        )
    return (out.transpose(0, 1) if batch_first else out), sizes.lengths


def _last_cell(
    x: Tensor, out: Tensor, first: Sequence[Tensor], weights: Sequence[Tensor], inside: Tensor
) -> Tensor:
    """The cell of an LSTM at the end of each sequence [n, hidden], from all its states [time, n, hidden]."""
    into, over, *biases = weights
    before = torch.cat([first[0].unsqueeze(0), out[:-1]])
    gates = F.linear(x, into, *biases[:1]) + F.linear(before, over, *biases[1:])
    enters, stays, new, _ = gates.chunk(4, -1)
    added, kept, cell = torch.sigmoid(enters) * torch.tanh(new), torch.sigmoid(stays), first[1]
    for time in range(x.shape[0]):
        cell = torch.where(inside[time], kept[time] * cell + added[time], cell)
    return cell


def _picked(x: Tensor, times: Tensor) -> Tensor:
    return x.gather(0, times.expand(-1, -1, x.shape[2]))


def _variables_of(code: CodeType) -> dict[str, Any] | None:
    """The variables of a function of torch that has made the running call; None if another one has."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not code:
        name = frame.f_code.co_name
        if name != "__torch_function__" and frame.f_code.co_filename not in _BETWEEN:
            return None
        frame = frame.f_back
    return dict(frame.f_locals) if frame.f_code is code else None


# Files of what is between such a function and here, beside function modes.
_BETWEEN = (__file__, torch.overrides.__file__)
