"""Demands of torch's kernels on dtypes, which tracing leaves out: tensors without data pass where real ones do not."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch.utils._pytree import tree_map

from weft.capture.fx.locations import location_of
from weft.capture.fx.refusals import refuse_op
from weft.ops.cost import dtype_name

# Operands, by their places, that have one dtype.
_ALIKE: dict[str, tuple[int, ...]] = {
    "aten.mm.default": (0, 1),
    "aten.bmm.default": (0, 1),
    "aten.addmm.default": (0, 1, 2),
    "aten.baddbmm.default": (0, 1, 2),
    "aten.convolution.default": (0, 1, 2),
    "aten._cdist_forward.default": (0, 1),
    "aten.grid_sampler_2d.default": (0, 1),
    "aten.binary_cross_entropy.default": (0, 1, 2),
    "aten.index_add.default": (0, 3),
    "aten.index_copy.default": (0, 3),
}
# Input and parameters of a norm have one dtype; those of a 16-bit input may be float32.
_NORMS: dict[str, tuple[int, ...]] = {
    "aten.native_layer_norm.default": (0, 2, 3),
    "aten.native_group_norm.default": (0, 1, 2),
    "aten._native_batch_norm_legit_functional.default": (0, 1, 2),
}
_16_BITS = (torch.bfloat16, torch.float16)
# Numbers of classes, by their place.
_CLASSES: dict[str, int] = {
    "aten.nll_loss_forward.default": 1,
    "aten.nll_loss2d_forward.default": 1,
}
# Targets that are no numbers of classes.
_TARGETS: dict[str, int] = {"aten.binary_cross_entropy_with_logits.default": 1}

# Said by kernels that do not know a dtype.
_UNKNOWN = re.compile(r"not implemented for '|can't be cast to the desired|only support floating")
# Elements of operands and result with which a call is tried at most.
_TRIED = 1 << 24


def check_dtypes(graph: torch.fx.Graph) -> None:
    """Refuse calls of a located trace that torch's kernels refuse for the dtypes of their operands.

    Raises:
        CaptureError: naming the user's line.
    """
    tried: set[tuple[object, ...]] = set()
    for node in graph.nodes:
        if node.op == "call_function":
            _check(node)
            _try_on_whole_numbers(node, tried)


def _check(node: torch.fx.Node) -> None:
    op = str(node.target)
    operands = _dtypes(node, *_ALIKE.get(op, ()), *_NORMS.get(op, ()))
    wanted = {*operands[:1], *([torch.float32] if op in _NORMS and operands[0] in _16_BITS else [])}
    classes = _dtypes(node, *([_CLASSES[op]] if op in _CLASSES else []))
    targets = _dtypes(node, *([_TARGETS[op]] if op in _TARGETS else []))
    if not wanted.issuperset(operands):
        takes, convert = (
            "operands of one dtype",
            "convert one, such as a batch in float64 by x.float()",
        )
    elif any(each not in (torch.int64, torch.uint8) for each in classes):
        takes, convert = "classes in int64", "convert them by y.long()"
    elif any(not each.is_floating_point for each in targets):
        takes, convert = "targets in floating point", "convert them by y.float()"
    else:
        return
    found = ", ".join(dtype_name(each) for each in (*operands, *classes, *targets))
    raise refuse_op(node.target, location_of(node), f"takes {takes}, found {found}; {convert}")


def _try_on_whole_numbers(node: torch.fx.Node, tried: set[tuple[object, ...]]) -> None:
    """Refuse a call whose tensors hold whole numbers alone, and whose kernel does not know these.

    Most kernels show their demands only when called, so each kernel is tried once for its dtypes.
    """
    op, made, given = node.target, node.meta.get("val"), _values(node)
    if not isinstance(op, torch._ops.OpOverload):
        return
    values = [*given, made] if isinstance(made, torch.Tensor) else given
    key = (op, *(each.dtype for each in values))
    if key in tried or not given or not _may_be_tried(op, given, values):
        return
    tried.add(key)
    args, kwargs = tree_map(_ones, (node.args, node.kwargs))
    try:
        with torch.no_grad():
            op(*args, **kwargs)
    except Exception as error:
        if _UNKNOWN.search(str(error)):
            found = ", ".join(dict.fromkeys(dtype_name(each.dtype) for each in given))
            text = f"takes numbers in floating point, found {found}; convert them, such as by x.float()"
            raise refuse_op(op, location_of(node), text) from None


def _may_be_tried(
    op: torch._ops.OpOverload, given: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> bool:
    """True where a call on whole numbers alone has no effect but its result, and takes little time."""
    if any(each.is_floating_point() or each.is_complex() for each in given):
        return False
    # A kernel of the user's may do anything. Products take longer than their elements say, and have whole numbers.
    if op.namespace != "aten" or str(op) in _ALIKE:
        return False
    if op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    return sum(each.numel() for each in values) <= _TRIED


def _values(node: torch.fx.Node) -> list[torch.Tensor]:
    """The operands of a call that are tensors."""
    found = [each.meta.get("val") for each in node.all_input_nodes]
    return [each for each in found if isinstance(each, torch.Tensor)]


def _ones(given: object) -> object:
    if not isinstance(given, torch.fx.Node):
        return given
    value = given.meta["val"]
    return torch.ones(value.shape, dtype=value.dtype)


def _dtypes(node: torch.fx.Node, *places: int) -> list[torch.dtype]:
    operands = [node.args[place] for place in places if place < len(node.args)]
    return [each.meta["val"].dtype for each in operands if isinstance(each, torch.fx.Node)]
