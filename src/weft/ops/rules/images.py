"""Convolutions by batch, channels and groups; pooling, padding and resampling by batch and channels.

Convolutions and some poolings may also be split along space, on windows (`weft.ops.windows`).
"""

from __future__ import annotations

from math import prod

from weft.ops.call import OpCall, Operand, argument, slot_specs, tensor_argument, with_arguments
from weft.ops.factors import WHOLE, Dims, Factors
from weft.ops.rule import Cut, RuleOptions, aten, resized, rule
from weft.ops.rules.common import FIRST, numbered, of_floats, shape_of, spread
from weft.ops.windows import Frames, Sliding, adapt_to_window, slides, whole_frame


def _image(rank: int, channel: str) -> Dims:
    return ("n", channel, *(WHOLE,) * (rank - 2))


def _weight(rank: int, groups: int, transposed: bool) -> Dims:
    if groups > 1:
        return ("g", *(WHOLE,) * (rank - 1))
    return (*("io" if transposed else "oi"), *(WHOLE,) * (rank - 2))


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


@rule(
    (*aten("convolution"), "weft.convolution"),
    linear=((0, 2), (1, 2)),
    added=(2,),
    adapt=_adapt_convolution,
    flops=_convolution_flops,
)
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


slides("convolution", Sliding(_frames, lambda _: {0: "read"}, arity=9))


@rule(
    (*aten("convolution_backward"), "weft.convolution_backward"),
    linear=FIRST,
    adapt=_adapt_convolution_backward,
    flops=_convolution_flops,
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


slides(
    "convolution_backward",
    Sliding(_frames, _backward_windows, arity=11, partial=frozenset((1, 2))),
)


def _adapt_pool(local: OpCall, cut: Cut) -> OpCall:
    return adapt_to_window(local, cut) or local


def _pool_frames(call: OpCall) -> Frames:
    """The frames of height and width."""
    backward = "backward" in call.op
    first = 2 if backward else 1
    specs = slot_specs(call)
    outs = specs[0].shape if backward else shape_of(call.results[0])
    x = specs[1 if backward else 0].shape
    kernel = spread(argument(call, first), 2)
    stride = spread(argument(call, first + 1) or kernel, 2)
    padding = spread(argument(call, first + 2, default=0), 2)
    dilation = (1, 1)
    if "max" in call.op:
        dilation = spread(argument(call, first + 3, default=1), 2)  # type: ignore[assignment]
    sizes = zip(x[-2:], outs[-2:], kernel, stride, padding, dilation, strict=True)
    return tuple(whole_frame(*numbers) for numbers in sizes)


def _pool(op: str, factors: str, sliding: Sliding, linear: bool) -> None:
    rule((*aten(op), f"weft.{op}"), factors, linear=of_floats if linear else (), adapt=_adapt_pool)
    slides(op, sliding)


_pool(
    "max_pool2d_with_indices",
    "... 1 1 -> ... 1 1, ... 1 1",
    Sliding(_pool_frames, lambda _: {0: "read"}, arity=6, defaults=((), 0, 1, False)),
    linear=False,
)
_pool(
    "max_pool2d_with_indices_backward",
    "... 1 1, ... 1 1, _, _, _, _, _, ... 1 1 -> ... 1 1",
    Sliding(_pool_frames, lambda _: {0: "returned", 1: "own", 7: "returned"}, arity=8),
    linear=True,
)
_pool(
    "avg_pool2d",
    "... 1 1 -> ... 1 1",
    Sliding(_pool_frames, lambda _: {0: "read"}, arity=7, defaults=((), 0, False, True, None)),
    linear=True,
)
_pool(
    "avg_pool2d_backward",
    "... 1 1, ... 1 1 -> ... 1 1",
    Sliding(_pool_frames, lambda _: {0: "returned", 1: "own"}, arity=8),
    linear=True,
)


# The ops below are split by batch and channels only. Space stays whole.


def _columns(call: OpCall) -> Factors:
    """Blocks of columns belong to channels, so that a split of the channels is one of the columns.

    A single channel has nothing to split, though it has columns.
    """
    short = 2 if call.op == "aten.col2im.default" else 3
    before, after = slot_specs(call)[0].shape, shape_of(call.results[0])
    batch = tuple(f"d{i}" for i in range(len(before) - short))
    space = (len(before) - len(batch), len(after) - len(batch))
    channel = WHOLE if 1 in (before[len(batch)], after[len(batch)]) else "c"
    names = tuple((*batch, channel, *(WHOLE,) * (rank - 1)) for rank in space)
    return Factors(names[:1], names[1:])


MOVES: RuleOptions = {"linear": FIRST, "monotone": FIRST}

rule(aten("adaptive_max_pool2d"), "... 1 1 -> ... 1 1, ... 1 1")
rule(aten("adaptive_max_pool2d_backward"), "... 1 1, ... 1 1, ... 1 1 -> ... 1 1", linear=FIRST)
rule(aten("max_pool3d_with_indices adaptive_max_pool3d"), "... 1 1 1 -> ... 1 1 1, ... 1 1 1")
rule(
    aten("max_pool3d_with_indices_backward"),
    "... 1 1 1, ... 1 1 1, _, _, _, _, _, ... 1 1 1 -> ... 1 1 1",
    linear=FIRST,
)
rule(
    aten("adaptive_max_pool3d_backward"),
    "... 1 1 1, ... 1 1 1, ... 1 1 1 -> ... 1 1 1",
    linear=FIRST,
)

rule(aten("avg_pool1d adaptive_avg_pool1d"), "... 1 -> ... 1", linear=of_floats)
rule(aten("_adaptive_avg_pool2d"), "... 1 1 -> ... 1 1", linear=of_floats)
rule(aten("avg_pool3d _adaptive_avg_pool3d"), "... 1 1 1 -> ... 1 1 1", linear=of_floats)
rule(
    aten("_adaptive_avg_pool2d_backward"),
    "... 1 1, ... 1 1 -> ... 1 1",
    linear=FIRST,
)
rule(
    aten("avg_pool3d_backward _adaptive_avg_pool3d_backward"),
    "... 1 1 1, ... 1 1 1 -> ... 1 1 1",
    linear=FIRST,
)

for _dims in (1, 2, 3):
    _space = " 1" * _dims
    rule(
        aten(f"reflection_pad{_dims}d replication_pad{_dims}d"),
        f"...{_space} -> ...{_space}",
        **MOVES,
    )
    rule(
        aten(f"reflection_pad{_dims}d_backward replication_pad{_dims}d_backward"),
        f"...{_space}, ...{_space} -> ...{_space}",
        linear=FIRST,
        ignored=(1,),
    )

for _name in ("nearest1d", "linear1d"):
    rule(aten(f"upsample_{_name}"), "... 1 -> ... 1", linear=of_floats)
    rule(aten(f"upsample_{_name}_backward"), "... 1 -> ... 1", linear=FIRST, adapt=resized(2))
rule(
    aten("upsample_nearest2d upsample_bilinear2d upsample_bicubic2d"),
    "... 1 1 -> ... 1 1",
    linear=of_floats,
)
rule(
    aten("upsample_nearest2d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward"),
    "... 1 1 -> ... 1 1",
    linear=FIRST,
    adapt=resized(2),
)


@rule(aten("pixel_shuffle pixel_unshuffle"), **MOVES)
def _pixels(call: OpCall) -> Factors:
    """Blocks of pixels and groups of channels go together, where the ranks divide the numbers of both."""
    before, after = slot_specs(call)[0].shape, shape_of(call.results[0])
    names = numbered(len(before))
    kept = tuple(
        WHOLE if 1 in (a, b) and a != b else name
        for name, a, b in zip(names, before, after, strict=True)
    )
    return Factors((kept,), (kept,))


rule(aten("im2col"), _columns, **MOVES)
rule(aten("col2im"), _columns, linear=FIRST)
rule(aten("grid_sampler_2d"), "n c 1 1, n 1 1 1 -> n c 1 1", linear=FIRST)
rule(
    aten("grid_sampler_2d_backward"),
    "n c+ 1 1, n c 1 1, n 1 1 1 -> n c 1 1, n 1 1 1",
    linear=FIRST,
)
