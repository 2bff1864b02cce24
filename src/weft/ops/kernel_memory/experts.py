"""Memory of the kernels of experts (`weft.runtime.kernels.expert_ops`).

How many rows an expert gets, only the step knows; these are bounds over all cases.
"""

from __future__ import annotations

from weft.ops.arguments import argument, slot_specs
from weft.ops.call import OpCall
from weft.ops.cost import tensor_bytes
from weft.ops.kernel_memory.layers import FEW, INT, Formula, count, item, made, result
from weft.ops.rules.own.experts import rows_of_expert


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


def _routes(call: OpCall) -> int:
    """Experts, order, blocks, places, and what these are made of."""
    groups, blocks = int(argument(call, 2)), int(argument(call, 3))
    return 10 * INT * count(call.operands[0]) + 4 * INT * groups * (blocks + 1) + FEW


def _places(rows: int) -> int:
    return (4 * INT + 4) * rows


def _dispatch(call: OpCall) -> int:
    x, places = slot_specs(call)
    rows = count(places)
    taken = min(rows * (count(x) // max(1, x.shape[0])), count(result(call))) * item(x)
    return max(_places(rows), 3 * INT * rows + taken) + FEW


def _combine(call: OpCall) -> int:
    places = slot_specs(call)[1]
    rows, each, whole = count(places), int(argument(call, 5)), result(call)
    if each == 1:
        return max(_places(rows), 2 * INT * rows + tensor_bytes(whole)) + FEW
    # One of each `each` rows at a time: read, and added to what is there.
    wide = 2 if whole.dtype in ("bfloat16", "float16") else 1
    adding = 2 * INT * rows + 4 * INT * (rows // each) + (1 + wide) * tensor_bytes(whole)
    return (wide - 1) * 2 * tensor_bytes(whole) + max(_places(rows), adding) + FEW


BESIDE: dict[str, Formula] = {
    "weft.expert_mm": _products,
    "weft.expert_gradient": _products,
    "weft.routes": _routes,
    "weft.dispatch": _dispatch,
    "weft.combine": _combine,
    "weft.segments": lambda call: count(result(call)) * item(call.operands[0]) + FEW,
}
