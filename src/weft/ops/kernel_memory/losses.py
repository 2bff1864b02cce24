"""Memory of the kernels of losses, random numbers and windows."""

from __future__ import annotations

from math import prod
from typing import Any

from weft.ops.arguments import argument, slot_specs
from weft.ops.call import OpCall, TensorSpec
from weft.ops.cost import tensor_bytes
from weft.ops.kernel_memory.layers import FEW, INT, Formula, count, few, item, result
from weft.ops.weft_ops import CPU_CHUNK, DEVICE_CHUNK, ELEMENTS_AT_A_TIME


def _rows(spec: TensorSpec) -> int:
    """The bytes of a few rows at a time."""
    rows, width = spec.shape
    some = min(rows, max(1, ELEMENTS_AT_A_TIME // max(1, width)))
    return some * width * item(spec)


def _sum_exp(call: OpCall) -> int:
    x = slot_specs(call)[0]
    if len(x.shape) != 2 or argument(call, 2) != 1:
        return tensor_bytes(x)
    return _rows(x) + tensor_bytes(result(call)) + FEW


def _class_loss(call: OpCall) -> int:
    x, _, target = slot_specs(call)
    return (INT + 2 + 2 * item(x)) * count(target) + FEW


def _class_loss_backward(call: OpCall) -> int:
    _, x, _, target = slot_specs(call)
    return (INT + 3 + 3 * item(x)) * count(target) + FEW


def _own_classes(call: OpCall) -> int:
    target = slot_specs(call)[1 if call.op == "weft.nll_loss_shard" else 2]
    return (INT + 1) * count(target) + FEW


def _ctc(call: OpCall) -> int:
    sums = result(call, 1)
    return 2 * tensor_bytes(sums) + 4 * count(sums) + INT * sum(sums.shape[1:]) + FEW


def _reduced(call: OpCall) -> int:
    """A mean or a sum stands in memory for all elements, and is taken out of it (`dense_operands`)."""
    x, *rest = (spec.shape for spec in call.operands)
    rank = max(map(len, (x, *rest)))
    shapes = [(1,) * (rank - len(one)) + tuple(one) for one in (x, *rest)]
    whole = prod(max(sizes) for sizes in zip(*shapes, strict=True))
    return whole * item(result(call)) if not result(call).shape else 0


def _first(call: OpCall) -> int:
    """A copy of the first operand, or memory as large as it."""
    return tensor_bytes(call.operands[0])


def _solved(call: OpCall) -> tuple[int, ...]:
    """The solution stands in memory for the right side."""
    right = slot_specs(call)[1]
    return (max(0, tensor_bytes(right) - tensor_bytes(result(call))),)


def _uniform(call: OpCall) -> int:
    """Two integers for each number that is hashed at a time, and one for each run of numbers."""
    shapes: Any = call.args
    chunk = CPU_CHUNK if _on_cpu(call) else DEVICE_CHUNK
    whole, runs = result(call), _runs(shapes[0], shapes[2])
    run = count(whole) // max(1, runs)
    width = min(run, chunk)
    height = min(runs, max(1, chunk // max(1, width)))
    hashing = 2 * INT * (width * height + runs) + INT * (width + height)
    if whole.dtype in ("float32", "float64"):
        return hashing + FEW
    return max(hashing + 2 * count(whole), 4 * count(whole)) + FEW


def _on_cpu(call: OpCall) -> bool:
    device = dict(call.kwargs).get("device")
    return getattr(device, "name", "cpu").startswith("cpu")


def _runs(size: tuple[int, ...], length: tuple[int, ...]) -> int:
    inner = len(size)
    while inner and length[inner - 1] == size[inner - 1]:
        inner -= 1
    return prod(length[: max(inner - 1, 0)])


BESIDE: dict[str, Formula] = {
    "weft.uniform": _uniform,
    "weft.cross_entropy_backward": lambda call: _rows(result(call)),
    "weft.sum_exp": _sum_exp,
    "weft.class_loss": _class_loss,
    "weft.class_loss_backward": _class_loss_backward,
    "weft.nll_loss_shard": _own_classes,
    "weft.nll_loss_backward_shard": _own_classes,
    "weft.ctc_loss": _ctc,
    "weft.ctc_loss_backward": lambda call: tensor_bytes(slot_specs(call)[5]),
    "aten.mse_loss.default": _reduced,
    "aten.smooth_l1_loss.default": _reduced,
    "aten.soft_margin_loss.default": _reduced,
    "aten.huber_loss.default": _reduced,
    "aten.binary_cross_entropy.default": _reduced,
    **dict.fromkeys(
        (
            *("aten.col2im.default", "aten.copy.default"),
            *("aten.select_scatter.default", "aten.slice_scatter.default"),
        ),
        _first,
    ),
    **dict.fromkeys(
        ("weft.square_sum", "weft.nonfinite", "weft.scale", "weft.clip_factor", "weft.next_scale"),
        few,
    ),
}
PADDING = {"weft.lstsq": _solved}
