"""Memory of the kernels of layers: recurrent ones, norms, attention, embeddings."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TypeAlias

from weft.ops.arguments import argument, slot_specs, tensor_argument
from weft.ops.call import OpCall, TensorSpec
from weft.ops.cost import tensor_bytes
from weft.ops.rules.layers.normalization import FEW_POSITIONS, MANY_POSITIONS
from weft.ops.rules.layers.recurrent import SAVED, workspace_bytes
from weft.ops.weft_ops import ELEMENTS_AT_A_TIME
from weft.units import ITEM_SIZE

# Bytes that a call takes.
Formula: TypeAlias = Callable[[OpCall], int]
# Bytes of a few numbers: scalars on their way.
FEW = 64
INT = 8  # bytes of an index


def count(spec: TensorSpec) -> int:
    """The elements of a tensor."""
    return prod(spec.shape)


def item(spec: TensorSpec) -> int:
    """Bytes of an element."""
    return ITEM_SIZE.get(spec.dtype, 8)


def result(call: OpCall, number: int = 0) -> TensorSpec:
    """A result; one that is no tensor has no elements."""
    found = call.results[number] if number < len(call.results) else None
    return TensorSpec((0,), "uint8") if found is None else found


def made(call: OpCall) -> int:
    """Bytes of all results."""
    return sum(tensor_bytes(spec) for spec in call.results if spec is not None)


def few(call: OpCall) -> int:
    """A few numbers, whatever the operands."""
    return FEW


_HALF = ("bfloat16", "float16")


def _is_fused(call: OpCall, saved: TensorSpec) -> bool:
    """True where oneDNN saves what it needs: not gates and cells."""
    x = slot_specs(call)[0] if call.op == "weft.lstm" else tensor_argument(call, 3)
    out = result(call) if call.op == "weft.lstm" else tensor_argument(call, 10)
    if x is None or out is None or x.dtype not in ("float32", "bfloat16"):
        return False
    return saved.shape[-1] != 5 * x.shape[0] * out.shape[-1] * item(x)


def _lstm(call: OpCall) -> int:
    """Step by step: the products of all inputs, gates and cells of one step."""
    if _is_fused(call, result(call, SAVED)):
        return FEW
    x, out = slot_specs(call)[0], result(call)
    steps, batch, hidden = out.shape
    return (4 * hidden * (steps * batch + batch + 1) + 4 * batch * hidden) * item(x) + FEW


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
    """The workspace of oneDNN stands on whole pages."""
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


def _batch_norm_sums(call: OpCall) -> int:
    x = slot_specs(call)[1]
    return _turned(x) + 3 * INT * x.shape[1] + FEW


def _batch_norm_gradient(call: OpCall) -> int:
    x = slot_specs(call)[1]
    return _turned(x) + tensor_bytes(x) + 12 * item(x) * x.shape[1] + FEW


def _batch_norm(call: OpCall) -> int:
    x = call.operands[0]
    large = len(x.shape) == 4 and argument(call, 5) is True and x.dtype == "float32"
    if not large or prod(x.shape[2:]) < MANY_POSITIONS or count(x) < 2 * ELEMENTS_AT_A_TIME:
        return 0
    return _batch_moments(call) + 8 * INT * x.shape[1]


def _batch_norm_backward(call: OpCall) -> int:
    x = slot_specs(call)[1]
    return _turned(x) if argument(call, 7) is True and x.dtype == "float32" else 0


def _own_keys(call: OpCall, offset: int) -> tuple[int, int]:
    """The range of keys at the positions of the queries."""
    back = int(call.op == "weft.attention_rows_backward")
    query, key = slot_specs(call)[back : back + 2]
    return min(offset, key.shape[2]), min(offset + query.shape[2], key.shape[2])


def _attention_rows(call: OpCall) -> int:
    """A second part of the keys, before the two are joined."""
    out, sums = result(call), result(call, 1)
    first, end = _own_keys(call, argument(call, 3))
    if first in (0, end):
        return FEW
    wide = 10 * count(out) if out.dtype in _HALF else 0
    return tensor_bytes(out) + wide + 3 * tensor_bytes(sums) + FEW


def _attention_rows_backward(call: OpCall) -> int:
    key = result(call, 1)
    first, end = _own_keys(call, argument(call, 6))
    if first == end or (first, end) == (0, key.shape[2]):
        return FEW
    # Those of the part before the queries, and where both stand together.
    return max(2 * tensor_bytes(key), tensor_bytes(result(call))) + FEW


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


def _matmul(call: OpCall) -> int:
    whole = result(call)
    operands = (spec for spec in call.operands if len(spec.shape) > 2)
    return sum(prod(whole.shape[:-2]) * prod(x.shape[-2:]) * item(x) for x in operands)


BESIDE: dict[str, Formula] = {
    "aten.matmul.default": _matmul,
    "weft.lstm": _lstm,
    "weft.lstm_backward": _lstm_backward,
    "weft.batch_moments": _batch_moments,
    "weft.batch_statistics": lambda call: 5 * INT * call.operands[0].shape[1] + FEW,
    "weft.batch_norm_sums": _batch_norm_sums,
    "weft.batch_norm_gradient": _batch_norm_gradient,
    "aten._native_batch_norm_legit_functional.default": _batch_norm,
    "weft.batch_norm": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "weft.batch_norm_backward": _batch_norm_backward,
    "weft.attention_rows": _attention_rows,
    "weft.attention_rows_backward": _attention_rows_backward,
    "weft.embedding_shard": lambda call: (2 * INT + 1) * count(slot_specs(call)[1]) + FEW,
    "weft.embedding_dense_backward_shard": _embedding_gradient,
    "aten._embeddinglambda call: tensor_bytes(call.operands[0]).default": lambda call: tensor_bytes(
        call.operands[0]
    ),
}
PADDING = {
    "weft.lstm": _workspace,
    "weft.batch_statistics": _mean_of_moments,
    "weft.embedding_dense_backward_shard": _last_row,
    "aten._embedding_bag.default": _bag_indices,
}
