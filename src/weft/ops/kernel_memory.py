"""The memory that kernels take beside their results, and that results take beside their elements.

It covers one call on one rank, by its shapes: the kernels of `weft.runtime.kernels`, and the ATen kernels of which a
dispatch mode sees more than the results. Memory that a torch kernel allocates inside stays unseen. A test runs every
op and holds it against these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

from weft.ops.call import OpCall, TensorSpec, argument, slot_specs, tensor_argument
from weft.ops.cost import tensor_bytes
from weft.ops.rule import KNOWN_CALLS
from weft.ops.rules.layers import FEW_POSITIONS, MANY_POSITIONS, SAVED, workspace_bytes
from weft.ops.rules.own_ops import rows_of_expert
from weft.ops.weft_ops import CPU_CHUNK, DEVICE_CHUNK, ELEMENTS_AT_A_TIME
from weft.ops.windows import Frame
from weft.units import ITEM_SIZE, NO_BYTES, Bytes

# Bytes that a call takes.
Formula: TypeAlias = Callable[[OpCall], int]
# By op: bytes beside the results of a call; for each result, bytes beyond its elements.
_BESIDE: dict[str, Formula] = {}
_PADDING: dict[str, Callable[[OpCall], tuple[int, ...]]] = {}
# Bytes of a few numbers: scalars on their way.
FEW = 64
INT = 8  # bytes of an index


def _beside(*ops: str) -> Callable[[Formula], Formula]:
    """Declare the formula of what the kernels of ops take beside their results."""

    def declare(formula: Formula) -> Formula:
        _BESIDE.update(dict.fromkeys(ops, formula))
        return formula

    return declare


def count(spec: TensorSpec) -> int:
    """The elements of a tensor."""
    return prod(spec.shape)


def item(spec: TensorSpec) -> int:
    """Bytes of an element."""
    return ITEM_SIZE.get(spec.dtype, 8)


def result(call: OpCall, number: int = 0) -> TensorSpec:
    """A result; one that is not a tensor has no elements."""
    found = call.results[number] if number < len(call.results) else None
    return TensorSpec((0,), "uint8") if found is None else found


def made(call: OpCall) -> int:
    """Bytes of all results."""
    return sum(tensor_bytes(spec) for spec in call.results if spec is not None)


_HALF = ("bfloat16", "float16")


def _is_fused(call: OpCall, saved: TensorSpec) -> bool:
    """True if oneDNN saves what it needs: not gates and cells."""
    x = slot_specs(call)[0] if call.op == "weft.lstm" else tensor_argument(call, 3)
    out = result(call) if call.op == "weft.lstm" else tensor_argument(call, 10)
    if x is None or out is None or x.dtype not in ("float32", "bfloat16"):
        return False
    return saved.shape[-1] != 5 * x.shape[0] * out.shape[-1] * item(x)


@_beside("weft.lstm")
def _lstm(call: OpCall) -> int:
    """Step by step: the products of all inputs, gates and cells of one step."""
    if _is_fused(call, result(call, SAVED)):
        return FEW
    x, out = slot_specs(call)[0], result(call)
    steps, batch, hidden = out.shape
    return (4 * hidden * (steps * batch + batch + 1) + 4 * batch * hidden) * item(x) + FEW


@_beside("weft.lstm_backward")
def _lstm_backward(call: OpCall) -> int:
    x, saved = tensor_argument(call, 3), slot_specs(call)[-1]
    if x is None:
        return FEW
    if _is_fused(call, saved):
        # oneDNN makes float32.
        return 2 * made(call) + FEW if x.dtype == "bfloat16" else FEW
    out = tensor_argument(call, 10)
    steps, batch, hidden = (0, 0, 0) if out is None else out.shape
    of_gates = 4 * steps * batch * hidden
    return (of_gates + max(12 * batch * hidden, steps * batch * hidden)) * item(x) + FEW


def _workspace(call: OpCall) -> tuple[int, ...]:
    """The workspace of oneDNN is on whole pages."""
    saved = result(call, SAVED)
    if not count(saved) or not _is_fused(call, saved):
        return ()
    x = slot_specs(call)[0]
    steps, batch, inputs = x.shape
    whole = workspace_bytes(steps, batch, inputs, result(call).shape[2], x.dtype)
    return (*(0 for _ in range(SAVED)), whole - count(saved))


def _turned(x: TensorSpec) -> int:
    """Copies with the channels last of a gradient and its input: of small images (`norm_ops`)."""
    small = len(x.shape) == 4 and 1 < prod(x.shape[2:]) < FEW_POSITIONS
    return 2 * tensor_bytes(x) if small else 0


@_beside("weft.batch_moments")
def _batch_moments(call: OpCall) -> int:
    """Moments of few numbers; of large images, the normalized copy of some of them."""
    x = call.operands[0]
    n, channels = x.shape[:2]
    positions = prod(x.shape[2:])
    if x.dtype != "float32" or positions < MANY_POSITIONS:
        return 3 * INT * channels + FEW
    image = channels * positions
    some = min(n, max(1, ELEMENTS_AT_A_TIME // max(1, image)))
    return some * (image * item(x) + channels * (2 * item(x) + 6 * INT)) + 4 * INT * channels


def _mean_of_moments(call: OpCall) -> tuple[int, ...]:
    """In float64 the mean is a view of moments."""
    mean = result(call, 1)
    return (0, tensor_bytes(mean)) if mean.dtype == "float64" else ()


@_beside("weft.batch_norm_sums")
def _batch_norm_sums(call: OpCall) -> int:
    x = slot_specs(call)[1]
    return _turned(x) + 3 * INT * x.shape[1] + FEW


@_beside("weft.batch_norm_gradient")
def _batch_norm_gradient(call: OpCall) -> int:
    x = slot_specs(call)[1]
    return _turned(x) + tensor_bytes(x) + 12 * item(x) * x.shape[1] + FEW


@_beside("aten._native_batch_norm_legit_functional.default", "weft.batch_norm")
def _batch_norm(call: OpCall) -> int:
    x = call.operands[0]
    large = len(x.shape) == 4 and argument(call, 5) is True and x.dtype == "float32"
    if not large or prod(x.shape[2:]) < MANY_POSITIONS or count(x) < 2 * ELEMENTS_AT_A_TIME:
        return 0
    return _batch_moments(call) + 8 * INT * x.shape[1]


@_beside("aten.native_batch_norm_backward.default", "weft.batch_norm_backward")
def _batch_norm_backward(call: OpCall) -> int:
    x = slot_specs(call)[1]
    return _turned(x) if argument(call, 7) is True and x.dtype == "float32" else 0


def _own_keys(call: OpCall, offset: int) -> tuple[int, int]:
    """The range of keys at the positions of the queries."""
    back = int(call.op == "weft.attention_rows_backward")
    query, key = slot_specs(call)[back : back + 2]
    return min(offset, key.shape[2]), min(offset + query.shape[2], key.shape[2])


@_beside("weft.attention_rows")
def _attention_rows(call: OpCall) -> int:
    """A second part of the keys, before the two are joined."""
    out, sums = result(call), result(call, 1)
    first, end = _own_keys(call, argument(call, 3))
    if first in (0, end):
        return FEW
    wide = 10 * count(out) if out.dtype in _HALF else 0
    return tensor_bytes(out) + wide + 3 * tensor_bytes(sums) + FEW


@_beside("weft.attention_rows_backward")
def _attention_rows_backward(call: OpCall) -> int:
    key = result(call, 1)
    first, end = _own_keys(call, argument(call, 6))
    if first == end or (first, end) == (0, key.shape[2]):
        return FEW
    # The ones of the part before the queries, and where both stand together.
    return max(2 * tensor_bytes(key), tensor_bytes(result(call))) + FEW


@_beside("weft.embedding_dense_backward_shard")
def _embedding_gradient(call: OpCall) -> int:
    rows = count(slot_specs(call)[1])
    return max((INT + 1) * rows, (2 * INT + 3) * rows - made(call)) + FEW


def _last_row(call: OpCall) -> tuple[int, ...]:
    """A row takes what belongs to no row of the shard."""
    whole = result(call)
    return (prod(whole.shape[1:]) * item(whole),)


def _bag_indices(call: OpCall) -> tuple[int, ...]:
    """The kernel cuts off an index too many."""
    return (0, *(INT if count(result(call, number)) else 0 for number in (1, 2)))


@_beside("aten.matmul.default")
def _matmul(call: OpCall) -> int:
    whole = result(call)
    operands = (spec for spec in call.operands if len(spec.shape) > 2)
    return sum(prod(whole.shape[:-2]) * prod(x.shape[-2:]) * item(x) for x in operands)


@_beside("weft.expert_mm", "weft.expert_gradient")
def _products(call: OpCall) -> int:
    """Rows by expert, then some rows of one expert and what they are multiplied with or make."""
    x, other, ids = slot_specs(call)
    rows = count(ids)
    forward = call.op == "weft.expert_mm"
    matrices = other.shape if forward else result(call).shape
    some = min(rows, rows_of_expert(rows, matrices[0]))
    width = x.shape[-1] + (matrices[-1] if forward else other.shape[-1])
    numbered = INT * rows if len(ids.shape) == 2 else 0
    by_expert = 2 * INT * rows + INT * (matrices[0] + 1) + some * width * item(x)
    sorting = 3 * INT * rows
    # Masks and numbers of rows come before the result is there.
    first = (2 * INT + 4) * rows - made(call)
    return numbered + max(by_expert, sorting, first) + FEW


@_beside("weft.routes")
def _routes(call: OpCall) -> int:
    """Experts, order, blocks, places, and what these are made of."""
    groups, blocks = int(argument(call, 2)), int(argument(call, 3))
    return 10 * INT * count(call.operands[0]) + 4 * INT * groups * (blocks + 1) + FEW


def _places(rows: int) -> int:
    return (4 * INT + 4) * rows


@_beside("weft.dispatch")
def _dispatch(call: OpCall) -> int:
    x, places = slot_specs(call)
    rows = count(places)
    taken = min(rows * (count(x) // max(1, x.shape[0])), count(result(call))) * item(x)
    return max(_places(rows), 3 * INT * rows + taken) + FEW


@_beside("weft.combine")
def _combine(call: OpCall) -> int:
    places = slot_specs(call)[1]
    rows, each, whole = count(places), int(argument(call, 5)), result(call)
    if each == 1:
        return max(_places(rows), 2 * INT * rows + tensor_bytes(whole)) + FEW
    # One of each `each` rows at a time: read, and added to what is there.
    wide = 2 if whole.dtype in ("bfloat16", "float16") else 1
    adding = 2 * INT * rows + 4 * INT * (rows // each) + (1 + wide) * tensor_bytes(whole)
    return (wide - 1) * 2 * tensor_bytes(whole) + max(_places(rows), adding) + FEW


def _rows(spec: TensorSpec) -> int:
    """The bytes of a few rows at a time."""
    rows, width = spec.shape
    some = min(rows, max(1, ELEMENTS_AT_A_TIME // max(1, width)))
    return some * width * item(spec)


@_beside("weft.sum_exp")
def _sum_exp(call: OpCall) -> int:
    x = slot_specs(call)[0]
    if len(x.shape) != 2 or argument(call, 2) != 1:
        return tensor_bytes(x)
    return _rows(x) + tensor_bytes(result(call)) + FEW


@_beside("weft.class_loss")
def _class_loss(call: OpCall) -> int:
    x, _, target = slot_specs(call)
    return (INT + 2 + 2 * item(x)) * count(target) + FEW


@_beside("weft.class_loss_backward")
def _class_loss_backward(call: OpCall) -> int:
    _, x, _, target = slot_specs(call)
    return (INT + 3 + 3 * item(x)) * count(target) + FEW


@_beside("weft.nll_loss_shard", "weft.nll_loss_backward_shard")
def _own_classes(call: OpCall) -> int:
    target = slot_specs(call)[1 if call.op == "weft.nll_loss_shard" else 2]
    return (INT + 1) * count(target) + FEW


@_beside("weft.ctc_loss")
def _ctc(call: OpCall) -> int:
    sums = result(call, 1)
    return 2 * tensor_bytes(sums) + 4 * count(sums) + INT * sum(sums.shape[1:]) + FEW


@_beside(
    "aten.mse_loss.default",
    "aten.smooth_l1_loss.default",
    "aten.soft_margin_loss.default",
    "aten.huber_loss.default",
    "aten.binary_cross_entropy.default",
)
def _reduced(call: OpCall) -> int:
    """A mean or a sum gets memory for all elements first (`dense_operands`)."""
    x, *rest = (spec.shape for spec in call.operands)
    rank = max(map(len, (x, *rest)))
    shapes = [(1,) * (rank - len(one)) + tuple(one) for one in (x, *rest)]
    whole = prod(max(sizes) for sizes in zip(*shapes, strict=True))
    return whole * item(result(call)) if not result(call).shape else 0


@_beside(
    "aten._embedding_bag_backward.default",
    "aten.col2im.default",
    "aten.copy.default",
    "aten.select_scatter.default",
    "aten.slice_scatter.default",
)
def _first(call: OpCall) -> int:
    """A copy of the first operand, or memory as large as it."""
    return tensor_bytes(call.operands[0])


def _solved(call: OpCall) -> tuple[int, ...]:
    """The solution is made in a copy of the right side."""
    right = slot_specs(call)[1]
    return (max(0, tensor_bytes(right) - tensor_bytes(result(call))),)


@_beside("weft.uniform")
def _uniform(call: OpCall) -> int:
    """Two integers for each number that is hashed at a time, and one for each run of numbers."""
    shapes: Any = call.args
    device = dict(call.kwargs).get("device")
    chunk = CPU_CHUNK if getattr(device, "name", "cpu").startswith("cpu") else DEVICE_CHUNK
    size: tuple[int, ...] = shapes[0]
    length: tuple[int, ...] = shapes[2]
    inner = len(size)
    while inner and length[inner - 1] == size[inner - 1]:
        inner -= 1
    whole, runs = result(call), prod(length[: max(inner - 1, 0)])
    run = count(whole) // max(1, runs)
    width = min(run, chunk)
    height = min(runs, max(1, chunk // max(1, width)))
    hashing = 2 * INT * (width * height + runs) + INT * (width + height)
    if whole.dtype in ("float32", "float64"):
        return hashing + FEW
    return max(hashing + 2 * count(whole), 4 * count(whole)) + FEW


def _frames(call: OpCall) -> tuple[Frame, ...]:
    numbers: Any = call.args[-1]
    return tuple(Frame(*each) for each in numbers)


def _padded(x: TensorSpec, frames: tuple[Frame, ...], everywhere: bool) -> int:
    """A window with its padding."""
    around = [sum(f.around) if f.cut or everywhere else 0 for f in frames]
    if not any(around):
        return 0
    space = x.shape[len(x.shape) - len(frames) :]
    rest = prod(x.shape[: len(x.shape) - len(frames)])
    return rest * prod(n + m for n, m in zip(space, around, strict=True)) * item(x)


def _reached(grad: TensorSpec, x: TensorSpec, frames: tuple[Frame, ...], everywhere: bool) -> int:
    """Gradients of the rows of the input that a window of outputs reads."""
    space = grad.shape[len(grad.shape) - len(frames) :]
    sizes = [
        (n - 1) * f.stride + f.extent if f.cut or everywhere else f.size
        for n, f in zip(space, frames, strict=True)
    ]
    return prod(x.shape[: len(x.shape) - len(frames)]) * prod(sizes) * item(grad)


@_beside("weft.convolution_backward")
def _convolution_backward(call: OpCall) -> int:
    grad, x = slot_specs(call)[:2]
    frames = _frames(call)
    to_input = 2 * _reached(grad, x, frames, everywhere=False) if call.results[0] else 0
    return max(to_input, _padded(x, frames, everywhere=False)) + FEW


@_beside("weft.max_pool2d_with_indices")
def _max_pool(call: OpCall) -> int:
    frames = _frames(call)
    return _padded(call.operands[0], frames, everywhere=True) + 3 * INT * count(result(call)) + FEW


@_beside("weft.max_pool2d_with_indices_backward")
def _max_pool_backward(call: OpCall) -> int:
    grad = slot_specs(call)[0]
    return (5 * INT + 4 + item(grad)) * count(grad) + FEW


@_beside("weft.avg_pool2d")
def _avg_pool(call: OpCall) -> int:
    frames, whole = _frames(call), result(call)
    counts = prod(whole.shape[len(whole.shape) - len(frames) :]) * item(whole)
    padded = _padded(call.operands[0], frames, everywhere=True)
    return padded + count(whole) * item(whole) + 2 * counts + FEW


@_beside("weft.avg_pool2d_backward")
def _avg_pool_backward(call: OpCall) -> int:
    grad, x = slot_specs(call)[:2]
    frames = _frames(call)
    counts = prod(grad.shape[len(grad.shape) - len(frames) :]) * item(grad)
    return count(grad) * item(grad) + 2 * _reached(grad, x, frames, True) + 2 * counts + FEW


_BESIDE.update(
    {
        "weft.batch_statistics": lambda call: 5 * INT * call.operands[0].shape[1] + FEW,
        "weft.embedding_shard": lambda call: (2 * INT + 1) * count(slot_specs(call)[1]) + FEW,
        "weft.segments": lambda call: count(result(call)) * item(call.operands[0]) + FEW,
        "weft.cross_entropy_backward": lambda call: _rows(result(call)),
        "weft.ctc_loss_backward": lambda call: tensor_bytes(slot_specs(call)[5]),
        "weft.convolution": lambda call: _padded(call.operands[0], _frames(call), everywhere=False),
        **dict.fromkeys(
            (
                *("weft.square_sum", "weft.nonfinite", "weft.scale"),
                *("weft.clip_factor", "weft.next_scale"),
            ),
            lambda _: FEW,
        ),
    }
)
_PADDING.update(
    {
        "weft.lstm": _workspace,
        "weft.batch_statistics": _mean_of_moments,
        "weft.embedding_dense_backward_shard": _last_row,
        "aten._embedding_bag.default": _bag_indices,
        "weft.lstsq": _solved,
    }
)
# The ops of which calls take more than the elements of their results.
TAKING = frozenset((*_BESIDE, *_PADDING))


# The ATen ops whose operands are laid in order where they run (`weft.runtime.kernels.dense_operands`).
LAYING = frozenset(
    f"aten.{name}"
    for name in (
        *("_embedding_bag.default", "_embedding_bag_backward.default"),
        *("_embedding_bag_dense_backward.default", "_embedding_bag_forward_only.default"),
        "_embedding_bag_per_sample_weights_backward.default",
        # For a contiguous matrix they factorize the transpose, which their backward knows; see
        # `weft.capture.ops.decompositions`.
        *("_linalg_det.default", "_linalg_slogdet.default"),
        *("_pdist_backward.default", "_pdist_forward.default"),
        *("_weight_norm_interface.default", "_weight_norm_interface_backward.default"),
        *("adaptive_max_pool3d_backward.default", "fractional_max_pool2d_backward.default"),
        *("fractional_max_pool3d_backward.default", "native_layer_norm_backward.default"),
        *("nll_loss2d_backward.default", "nanmedian.dim", "view_as_complex.default"),
        *("native_group_norm.default", "native_group_norm_backward.default"),
        *("max_pool3d_with_indices.default", "max_pool3d_with_indices_backward.default"),
    )
)


@lru_cache(maxsize=KNOWN_CALLS)
def beside(call: OpCall) -> Bytes:
    """The most that a call takes at a time beside its results, gone when it ends."""
    formula = _BESIDE.get(call.op)
    return NO_BYTES if formula is None else Bytes(max(0, formula(call)))


@lru_cache(maxsize=KNOWN_CALLS)
def padding(call: OpCall) -> tuple[Bytes, ...]:
    """For each result of a call, what its memory has beyond its elements, for as long as it is there."""
    formula = _PADDING.get(call.op)
    found = formula(call) if formula else ()
    return tuple(Bytes(found[i] if i < len(found) else 0) for i in range(len(call.results)))


def slice_copies(shape: Sequence[int], dim: int, length: int) -> bool:
    """True if `weft.slice` makes a copy: a block of `length` along `dim` is in pieces."""
    return length < shape[dim] and prod(shape[:dim]) > 1
