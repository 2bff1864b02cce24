"""Convolutions by batch, input and output channels and groups; by space on windows (`weft.ops.windows`)."""

from __future__ import annotations

from math import prod

from weft.ops.arguments import argument, slot_specs, tensor_argument, with_arguments
from weft.ops.call import OpCall, Operand
from weft.ops.factors import WHOLE, Dims, Factors
from weft.ops.rule import Cut, aten, rule
from weft.ops.rules.common import FIRST, shape_of, spread
from weft.ops.windows import Frames, Sliding, adapt_to_window, slides, whole_frame


def _image(rank: int, channel: str) -> Dims:
    return ("n", channel, *(WHOLE,) * (rank - 2))


def _weight(rank: int, groups: int, transposed: bool) -> Dims:
    if groups > 1:
        return ("g", *(WHOLE,) * (rank - 1))
    return (*("io" if transposed else "oi"), *(WHOLE,) * (rank - 2))


def _convolution(call: OpCall) -> Factors:
    """Channels of groups are split group by group; without groups, input channels are contracted.

    The kernel takes no empty input channels, and a rank without any has a summand of the bias.
    """
    transposed, groups = bool(argument(call, 6)), argument(call, 8)
    x, weight = call.operands[0].shape, call.operands[1].shape
    inner, outer = ("g", "g") if groups > 1 else ("i", "o")
    operands: list[Dims] = [_image(len(x), inner), _weight(len(weight), groups, transposed)]
    if isinstance(call.args[2], Operand):
        operands.append((outer,))
    return Factors(
        tuple(operands),
        (_image(len(x), outer),),
        contracted=frozenset("i"),
        hidden=(("g", groups),) if groups > 1 else (),
        filled=frozenset("i") if len(operands) > 2 else frozenset(),
    )


def _convolution_backward(call: OpCall) -> Factors:
    """Gradients of the weight add up over the batch, those of the input over output channels."""
    transposed, groups = bool(argument(call, 7)), argument(call, 9)
    rank = len(call.operands[0].shape)
    inner, outer = ("g", "g") if groups > 1 else ("i", "o")
    weight = _weight(rank, groups, transposed)
    results: tuple[Dims, ...] = (_image(rank, inner), weight, (outer,))
    return Factors(
        (_image(rank, outer), _image(rank, inner), weight),
        tuple(dims if spec else () for dims, spec in zip(results, call.results, strict=True)),
        contracted=frozenset("no"),
        hidden=(("g", groups),) if groups > 1 else (),
    )


def _adapt_convolution(local: OpCall, cut: Cut) -> OpCall:
    """Splitting by groups leaves fewer groups."""
    on_window = adapt_to_window(local, cut)
    if on_window is not None:
        return on_window
    return with_arguments(local, {8: _local_groups(local, cut, argument(local, 8), 0)})


def _adapt_convolution_backward(local: OpCall, cut: Cut) -> OpCall:
    on_window = adapt_to_window(local, cut)
    if on_window is not None:
        return on_window
    groups = _local_groups(local, cut, argument(local, 9), 1)
    outer = local.operands[0].shape[1]
    sizes = None if argument(local, 3) is None else (outer,)
    return with_arguments(local, {3: sizes, 9: groups})


def _local_groups(local: OpCall, cut: Cut, groups: int, x: int) -> int:
    whole, here = cut.whole.operands[x].shape[1], local.operands[x].shape[1]
    return groups * here // whole if groups > 1 else groups


def _convolution_flops(call: OpCall) -> int:
    """A multiply and an add for each output element, input channel of its group and position of the kernel."""
    backward = "backward" in call.op
    start = 1 if backward else 0
    x, weight = tensor_argument(call, start), tensor_argument(call, start + 1)
    assert x is not None
    assert weight is not None
    output = call.operands[0].shape if backward else shape_of(call.results[0])
    transposed = bool(argument(call, 7 if backward else 6))
    positions = prod(x.shape[:1]) * prod((x.shape if transposed else output)[2:])
    products = sum(1 for spec in call.results[:2] if spec) if backward else 1
    return 2 * products * positions * prod(weight.shape)


def _frames(call: OpCall) -> Frames:
    """One frame for each dimension of space; transposed convolutions do not slide."""
    backward = call.op == "aten.convolution_backward.default"
    shift = 1 if backward else 0
    if argument(call, 6 + shift):
        return ()
    specs = slot_specs(call)
    outs = specs[0].shape if backward else shape_of(call.results[0])
    x, weight = specs[shift].shape, specs[shift + 1].shape
    space = len(x) - 2
    stride, padding, dilation = (spread(argument(call, 3 + shift + i), space) for i in range(3))
    sizes = zip(x[2:], outs[2:], weight[2:], stride, padding, dilation, strict=True)
    return tuple(whole_frame(*numbers) for numbers in sizes)


def _backward_windows(call: OpCall) -> dict[int, str]:
    """Gradients of the input need border rows of what comes back, those of the weight border rows of the input."""
    to_input, to_weight, _ = call.results
    return {0: "returned" if to_input else "own", 1: "read" if to_weight else "own"}


rule(
    (*aten("convolution"), "weft.convolution"),
    _convolution,
    linear=((0, 2), (1, 2)),
    added=(2,),
    adapt=_adapt_convolution,
    flops=_convolution_flops,
)
slides("convolution", Sliding(_frames, lambda _: {0: "read"}, arity=9))
rule(
    (*aten("convolution_backward"), "weft.convolution_backward"),
    _convolution_backward,
    linear=FIRST,
    adapt=_adapt_convolution_backward,
    flops=_convolution_flops,
)
slides(
    "convolution_backward",
    Sliding(_frames, _backward_windows, arity=11, partial=frozenset((1, 2))),
)
