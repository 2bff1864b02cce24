"""Windows: the part of a tensor that a rank reads when kernels slide along a split dimension.

A convolution or a pooling that is split along space needs, beside a rank's own rows, the border
rows of its neighbours: the halo. So its operands are not cut into balanced shards but into windows that overlap; the
compiler has every rank fetch its window from whoever holds it. At the outer ends the local op adds padding.

Signatures with windows stand apart from `weft.ops.signatures`: code that uses them must fetch the windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from math import prod
from typing import final

from weft.layout import SBP, Broadcast, Partial, Split, shard_range
from weft.ops.call import Argument, OpCall, Signature, TensorSpec, argument, operand_indices
from weft.ops.rule import KNOWN_CALLS, Cut
from weft.ops.signatures import signatures
from weft.units import ITEM_SIZE, NO_BYTES, Bytes


@final
@dataclass(frozen=True, slots=True)
class Frame:
    """A rank's place along one dimension over which a kernel slides.

    Positions and lengths count rows of the whole tensors.

    Attributes:
        size, count: rows of the input and of the output.
        kernel, stride, padding, dilation: of the kernel.
        out_first, out_count: the rows of the output that are this rank's.
        in_first, in_count: the rows of the input that are this rank's.
    """

    size: int
    count: int
    kernel: int
    stride: int
    padding: int
    dilation: int
    out_first: int
    out_count: int
    in_first: int
    in_count: int

    @property
    def cut(self) -> bool:
        """True if the dimension is split."""
        return (self.out_count, self.in_count) != (self.count, self.size)

    @property
    def extent(self) -> int:
        """Rows of the input that one row of the output spans."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def read(self) -> tuple[int, int]:
        """(offset, length) of the rows of the input that the rank's outputs read; all where nothing is split."""
        if not self.cut:
            return 0, self.size
        start, end = self._span
        first = max(start, 0)
        return first, min(end, self.size) - first

    @property
    def around(self) -> tuple[int, int]:
        """Rows of padding before and after `read`."""
        (start, end), (first, length) = self._span, self.read
        return first - start, max(end - first - length, 0)

    @property
    def returned(self) -> tuple[int, int]:
        """(offset, length) of the outputs that are the rank's or that read one of its rows of the input."""
        reach = self.in_first + self.padding
        first = max(-((self.extent - 1 - reach) // self.stride), 0)
        end = min((reach + self.in_count - 1) // self.stride + 1, self.count)
        own = self.out_first, self.out_first + self.out_count
        first, end = (min(first, own[0]), max(end, own[1])) if first < end else own
        return first, end - first

    @property
    def _span(self) -> tuple[int, int]:
        """First row and end of what the rank's outputs read, padding included."""
        start = self.out_first * self.stride - self.padding
        return start, start + (self.out_count - 1) * self.stride + self.extent

    def part(self, parts: int, index: int) -> Frame:
        """The frame of one of several ranks."""
        outs = shard_range(self.count, parts, index)
        ins = shard_range(self.size, parts, index)
        return replace(self, out_first=outs[0], out_count=outs[1], in_first=ins[0], in_count=ins[1])


Frames = tuple[Frame, ...]


def whole_frame(
    size: int, count: int, kernel: int, stride: int, padding: int, dilation: int
) -> Frame:
    """The frame of a dimension that is not split."""
    return Frame(size, count, kernel, stride, padding, dilation, 0, count, 0, size)


@final
@dataclass(frozen=True)
class Sliding:
    """The way in which an op slides along dimensions.

    Attributes:
        frames: from a call on whole tensors to the frames of its last dimensions; () if it does not slide.
        windows: from a call to what its arguments are cut to: position -> "read", "returned", or
            "own".
        partial: numbers of the results that add up over the ranks; all others are split.
        arity: number of arguments of the op; the local op takes the frames after them.
        defaults: of the arguments that may be missing.
    """

    frames: Callable[[OpCall], Frames]
    windows: Callable[[OpCall], Mapping[int, str]]
    arity: int
    partial: frozenset[int] = frozenset()
    defaults: tuple[Argument, ...] = ()


_SLIDING: dict[str, Sliding] = {}

# (dimension, offset, length) of what a rank reads of an operand.
Window = tuple[int, int, int]


def slides(op: str, sliding: Sliding) -> None:
    """Declare how `aten.<op>.default` and its local op `weft.<op>` slide."""
    _SLIDING[f"aten.{op}.default"] = _SLIDING[f"weft.{op}"] = sliding


def slides_at(op: str) -> bool:
    """True if calls of the op may have windows."""
    return op in _SLIDING


def signatures_with_windows(call: OpCall, parts: int, empty: bool = False) -> tuple[Signature, ...]:
    """`signatures`, and those that split a dimension along which the op slides.

    Raises:
        RuleError: when the op has no rule.
    """
    return (*signatures(call, parts, empty), *window_signatures(call, parts))


@lru_cache(maxsize=KNOWN_CALLS)
def window_signatures(call: OpCall, parts: int) -> tuple[Signature, ...]:
    """The signatures under which operands are windows; see `windows`."""
    sliding = _SLIDING.get(call.op)
    if sliding is None or parts == 1:
        return ()
    frames = frames_of(call)
    first = len(call.operands[0].shape) - len(frames)
    return tuple(
        _signature(call, sliding, first + i)
        for i, frame in enumerate(frames)
        if _may_cut(frame, parts)
    )


def _may_cut(frame: Frame, parts: int) -> bool:
    """Every rank has rows; none of its outputs sees padding only."""
    enough = min(frame.size, frame.count) >= parts
    return enough and not frame.cut and frame.padding < frame.extent


def _signature(call: OpCall, sliding: Sliding, dim: int) -> Signature:
    cut = {_operand(call, position) for position in sliding.windows(call)}
    operands = tuple(Split(dim) if i in cut else Broadcast() for i in range(len(call.operands)))
    results: list[SBP] = []
    for number, spec in enumerate(call.results):
        whole: SBP = Partial() if number in sliding.partial else Split(dim)
        results.append(whole if spec else Broadcast())
    return Signature(operands, tuple(results))


def windows(
    call: OpCall, signature: Signature, parts: int, index: int
) -> tuple[Window | None, ...]:
    """The window that rank `index` of an axis reads of each operand; None if that is its shard."""
    none = (None,) * len(call.operands)
    if signature not in window_signatures(call, parts):
        return none
    found: list[Window | None] = list(none)
    dim, frame = _cut_frame(call, signature, parts, index)
    for position, kind in _SLIDING[call.op].windows(call).items():
        if kind != "own":
            offset, length = frame.read if kind == "read" else frame.returned
            found[_operand(call, position)] = (dim, offset, length)
    return tuple(found)


def adapt_to_window(local: OpCall, cut: Cut) -> OpCall | None:
    """The local op on windows, for an `adapt`; None if the signature has no windows."""
    call, signature = cut.whole, cut.signature
    if signature not in window_signatures(call, cut.parts):
        return None
    sliding = _SLIDING[call.op]
    dim, frame = _cut_frame(call, signature, cut.parts, cut.index)
    frames = list(frames_of(call))
    frames[dim - (len(call.operands[0].shape) - len(frames))] = frame
    operands = list(local.operands)
    for i, window in enumerate(windows(call, signature, cut.parts, cut.index)):
        if window is not None:
            shape = operands[i].shape
            shape = (*shape[:dim], window[2], *shape[dim + 1 :])
            operands[i] = TensorSpec(shape, operands[i].dtype)
    missing = sliding.arity - len(local.args)
    args = local.args[: sliding.arity] + sliding.defaults[len(sliding.defaults) - missing :]
    op = "weft." + call.op.split(".")[1]
    return replace(
        local, op=op, args=(*args, tuple(map(astuple, frames))), operands=tuple(operands)
    )


def frames_of(call: OpCall) -> Frames:
    """The frames of a call: of a local op as they were handed down, else of whole dimensions."""
    sliding = _SLIDING[call.op]
    if call.op.startswith("weft."):
        return tuple(Frame(*numbers) for numbers in argument(call, sliding.arity))
    return sliding.frames(call)


def _cut_frame(call: OpCall, signature: Signature, parts: int, index: int) -> tuple[int, Frame]:
    dim = next(sbp.dim for sbp in signature.operands if isinstance(sbp, Split))
    frames = frames_of(call)
    frame = frames[dim - (len(call.operands[0].shape) - len(frames))]
    return dim, frame.part(parts, index)


def _operand(call: OpCall, position: int) -> int:
    return next(operand_indices(call.args[position]))


def window_bytes(call: OpCall, signature: Signature, parts: int) -> tuple[Bytes, int]:
    """Bytes that the ranks of an axis fetch from each other before a call, and the number of exchanges."""
    if signature not in window_signatures(call, parts):
        return NO_BYTES, 0
    moved = [0] * len(call.operands)
    for index in range(parts):
        for i, window in enumerate(windows(call, signature, parts, index)):
            if window is not None:
                spec = call.operands[i]
                dim, offset, length = window
                start, own = shard_range(spec.shape[dim], parts, index)
                kept = max(min(offset + length, start + own) - max(offset, start), 0)
                row = prod(spec.shape) // spec.shape[dim] * ITEM_SIZE[spec.dtype]
                moved[i] += (length - kept) * row
    return Bytes(sum(moved)), sum(map(bool, moved))
