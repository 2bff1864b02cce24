"""What torch's kernels ask of dtypes and a trace does not: tensors without data pass where real ones would not."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weft.capture.fx.locations import location_of
from weft.capture.fx.refusals import refuse_op

aten = torch.ops.aten
# Operands, by their places, that have one dtype.
_ALIKE: dict[torch._ops.OpOverload, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.addmm.default: (0, 1, 2),
    aten.baddbmm.default: (0, 1, 2),
    aten.convolution.default: (0, 1, 2),
    aten._cdist_forward.default: (0, 1),
    aten.grid_sampler_2d.default: (0, 1),
    aten.binary_cross_entropy.default: (0, 1, 2),
    aten.index_add.default: (0, 3),
    aten.index_copy.default: (0, 3),
}
# Input and parameters of a norm have one dtype; those of a 16-bit input may be float32.
_NORMS: dict[torch._ops.OpOverload, tuple[int, ...]] = {
    aten.native_layer_norm.default: (0, 2, 3),
    aten.native_group_norm.default: (0, 1, 2),
    aten._native_batch_norm_legit_functional.default: (0, 1, 2),
}
# Classes, which are numbers of one of these dtypes.
_CLASSES: dict[torch._ops.OpOverload, int] = {
    aten.nll_loss_forward.default: 1,
    aten.nll_loss2d_forward.default: 1,
}
_OF_CLASSES = (torch.int64, torch.uint8)
# Targets that are no numbers of classes.
_TARGETS: dict[torch._ops.OpOverload, int] = {aten.binary_cross_entropy_with_logits.default: 1}


def check_dtypes(graph: torch.fx.Graph) -> None:
    """Refuse calls of a located trace that torch's kernels refuse for the dtypes of their operands.

    Raises:
        CaptureError: naming the user's line.
    """
    for node in graph.nodes:
        if node.op == "call_function":
            _check(node)


def _check(node: torch.fx.Node) -> None:
    op = node.target
    alike = _ALIKE.get(op) or _NORMS.get(op)  # type: ignore[arg-type]
    found = list(_dtypes(node, alike or ()))
    wanted = set(found[:1])
    if op in _NORMS and found and found[0] in (torch.bfloat16, torch.float16):
        wanted.add(torch.float32)
    if not wanted.issuperset(found):
        reason = f"takes operands of one dtype, found {_listed(found)}; convert one, such as a batch in float64 by x.float()"
        raise refuse_op(op, location_of(node), reason)
    classes = list(_dtypes(node, (_CLASSES[op],))) if op in _CLASSES else []  # type: ignore[index]
    if classes and classes[0] not in _OF_CLASSES:
        reason = f"takes classes in int64, found {_listed(classes)}; convert them by y.long()"
        raise refuse_op(op, location_of(node), reason)
    targets = list(_dtypes(node, (_TARGETS[op],))) if op in _TARGETS else []  # type: ignore[index]
    if targets and not targets[0].is_floating_point:
        reason = (
            f"takes targets in floating point, found {_listed(targets)}; convert them by y.float()"
        )
        raise refuse_op(op, location_of(node), reason)


def _dtypes(node: torch.fx.Node, places: tuple[int, ...]) -> Iterator[torch.dtype]:
    """Those of the operands that are tensors."""
    for place in places:
        operand = node.args[place] if place < len(node.args) else None
        if isinstance(operand, torch.fx.Node):
            yield operand.meta["val"].dtype


def _listed(dtypes: list[torch.dtype]) -> str:
    return ", ".join(str(each).removeprefix("torch.") for each in dtypes)
