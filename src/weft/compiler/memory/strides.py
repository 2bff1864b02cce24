"""The values of a rank that may be laid out differently in memory than in the order of their elements.

Sending such a value needs a copy first. Views are out of order where they turn dimensions around, repeat them,
or leave parts of inner ones out; most kernels turn dimensions of results as those of their operands. Which those are,
only torch knows: here it is every op of which an operand has the shape of the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import prod

from weft.ir.plan import Compute, LocalCall, LocalValue, RankPlan
from weft.ops import shares_memory
from weft.ops.call import Token
from weft.ops.weft_ops import WEFT_OPS

# Views that keep the order of the elements.
_KEEPING = frozenset(
    f"aten.{name}"
    for name in (
        *("view.default", "_unsafe_view.default", "reshape.default", "view.dtype", "alias.default"),
        *("unsqueeze.default", "squeeze.dim", "squeeze.dims", "squeeze.default", "detach.default"),
    )
)
# Views of a part along a dimension, with the place of that argument.
_PARTS = {
    "aten.select.int": 1,
    "aten.slice.Tensor": 1,
    "aten.narrow.default": 1,
    "aten.unbind.int": 1,
    "aten.split.Tensor": 2,
    "aten.split_with_sizes.default": 2,
    "aten.unsafe_split.Tensor": 2,
    "aten.unsafe_split_with_sizes.default": 2,
}
# Kernels whose results are laid out in order whatever the operands are, and some that turn them around.
_PRODUCTS = frozenset(f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm"))
_TURNING = ("attention", "linalg")
_CONTIGUOUS = Token("memory_format", "contiguous_format")


def out_of_order(plan: RankPlan) -> frozenset[str]:
    """The names of the values of a plan that may be laid out of order."""
    values = {item.value.name: item.value for item in plan.inputs}
    values |= {register.value.name: register.value for register in plan.registers}
    found: dict[str, bool] = {}
    for actor in plan.actors:
        if isinstance(actor, Compute):
            for node in actor.nodes:
                if isinstance(node, LocalCall):
                    values.update((value.name, value) for value in node.makes)
                    found.update(_made(node, values, found))
    return frozenset(found)


def _made(
    call: LocalCall, values: Mapping[str, LocalValue], found: Mapping[str, bool]
) -> dict[str, bool]:
    """The results of a call that may be laid out of order; true for those with dimensions turned around."""
    strided = [name for name in call.operands if name in found]
    shares = shares_memory(call.op)
    if call.op == "weft.slice" or not (strided or shares or _turns(call.op)):
        return {}  # a slice is in order, be it a view or a copy
    turned = any(found[name] for name in strided)
    if call.op in _KEEPING or (shares and call.op in WEFT_OPS):
        return {value.name: turned for value in _in_two_dims(call)} if strided else {}
    if shares:
        in_order = bool(call.operands) and not strided
        if in_order and _is_front(call, values[call.operands[0]].shape):
            return {}
        # For one dimension, a part along another one, or a number that is there again.
        cuts = call.op in _PARTS or call.op == "aten.expand.default"
        return {x.name: turned or not cuts for x in call.makes if prod(x.shape) > 1}
    if call.op in _PRODUCTS or dict(call.kwargs).get("memory_format") == _CONTIGUOUS:
        return {}
    # A kernel may turn its results as operands of their shape are turned.
    shapes = {values[name].shape for name in strided if found[name]}
    return {x.name: True for x in _in_two_dims(call) if x.shape in shapes or _turns(call.op)}


def _in_two_dims(call: LocalCall) -> list[LocalValue]:
    return [value for value in call.makes if sum(size > 1 for size in value.shape) > 1]


@cache
def _turns(op: str) -> bool:
    """True if an op turns its results around whatever the operands are."""
    return any(word in op for word in _TURNING)


def merges(shape: Sequence[int], made: Sequence[int]) -> bool:
    """True if a reshape joins dimensions, which it can only copy where they are out of order."""
    left, right = ([size for size in sizes if size != 1] for sizes in (shape, made))
    if 0 in left:
        return False
    while left:
        first, here, there = left.pop(0), 1, 1
        here *= first
        while here != there:
            if here > there:
                there *= right.pop(0)
            else:
                return True
    return False


def _is_front(call: LocalCall, shape: Sequence[int]) -> bool:
    """True if a view of a tensor in order is a part that is in one piece, or all of it."""
    if call.op not in _PARTS:
        return call.op in ("aten.t.default", "aten.transpose.int", "aten.permute.default") and (
            sum(size > 1 for size in shape) <= 1
        )
    place = _PARTS[call.op]
    dim = call.args[place] if place < len(call.args) else dict(call.kwargs).get("dim", 0)
    step = call.args[4] if call.op == "aten.slice.Tensor" and len(call.args) > 4 else 1
    return step == 1 and isinstance(dim, int) and prod(shape[: dim % max(1, len(shape))]) == 1
