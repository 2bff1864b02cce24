"""Pooling of images by batch and channels; by space on windows (`weft.ops.windows`)."""

from __future__ import annotations

from weft.ops.arguments import argument, slot_specs
from weft.ops.call import OpCall
from weft.ops.rule import Cut, aten, rule
from weft.ops.rules.common import of_floats, shape_of, spread
from weft.ops.windows import Frames, Sliding, adapt_to_window, slides, whole_frame


def _adapt(local: OpCall, cut: Cut) -> OpCall:
    return adapt_to_window(local, cut) or local


def _frames(call: OpCall) -> Frames:
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
    rule((*aten(op), f"weft.{op}"), factors, linear=of_floats if linear else (), adapt=_adapt)
    slides(op, sliding)


_pool(
    "max_pool2d_with_indices",
    "... 1 1 -> ... 1 1, ... 1 1",
    Sliding(_frames, lambda _: {0: "read"}, arity=6, defaults=((), 0, 1, False)),
    linear=False,
)
_pool(
    "max_pool2d_with_indices_backward",
    "... 1 1, ... 1 1, _, _, _, _, _, ... 1 1 -> ... 1 1",
    Sliding(_frames, lambda _: {0: "returned", 1: "own", 7: "returned"}, arity=8),
    linear=True,
)
_pool(
    "avg_pool2d",
    "... 1 1 -> ... 1 1",
    Sliding(_frames, lambda _: {0: "read"}, arity=7, defaults=((), 0, False, True, None)),
    linear=True,
)
_pool(
    "avg_pool2d_backward",
    "... 1 1, ... 1 1 -> ... 1 1",
    Sliding(_frames, lambda _: {0: "returned", 1: "own"}, arity=8),
    linear=True,
)
