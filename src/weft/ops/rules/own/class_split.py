"""The cross-entropy's negative log-likelihood, also split by classes: each rank picks the targets among its own.

A target of another rank's classes counts as ignored; losses and weights add up over the ranks. The
log-softmax in front is split by classes in `weft.compiler.families.log_softmax`.
"""

from __future__ import annotations

from dataclasses import replace

from weft.layout import Split
from weft.ops.arguments import argument, slot_specs, slots
from weft.ops.call import OpCall
from weft.ops.factors import WHOLE, Dims, Factors
from weft.ops.rule import Adapt, Cut, aten, rule
from weft.ops.rules.common import FIRST, numbered, shape_of
from weft.ops.rules.layers.loss import MEAN, NONE

NLL_SHARD = "weft.nll_loss_shard"
NLL_GRADIENT_SHARD = "weft.nll_loss_backward_shard"


def _class_dims(shape: tuple[int, ...]) -> Dims:
    """Factors of scores: (classes), (batch, classes) or (batch, classes, height, width)."""
    return ("c",) if len(shape) == 1 else ("n", "c", "y", "x")[: len(shape)]


def _target_dims(shape: tuple[int, ...]) -> Dims:
    return ("n", "y", "x")[: len(shape)]


def _forward(call: OpCall) -> Factors:
    """Sums are contracted; so are the classes whatever the reduction, except in a mean, which needs everything."""
    scores, target, *weight = slot_specs(call)
    operands = (_class_dims(scores.shape), _target_dims(target.shape), *(("c",) for _ in weight))
    results = tuple(_target_dims(shape_of(spec)) for spec in call.results)
    reduction = argument(call, 3, "reduction", MEAN)
    names = frozenset(name for dims in operands for name in dims)
    if reduction == MEAN:
        return Factors(operands, results, whole=names)
    return Factors(operands, results, frozenset("c") if reduction == NONE else names)


def _backward(call: OpCall) -> Factors:
    """The total weight is an operand, so that even a mean's gradient may be split by the batch."""
    gradient, scores, target, *rest = slot_specs(call)
    operands = (
        _target_dims(gradient.shape),
        _class_dims(scores.shape),
        _target_dims(target.shape),
        *(("c",) * len(spec.shape) for spec in rest),
    )
    return Factors(operands, (_class_dims(scores.shape),))


def _on_shard(op: str, scores: int) -> Adapt:
    """Run `op` with the first class's number where the scores (the tensor in slot `scores`) are split by classes."""

    def adapt(local: OpCall, cut: Cut) -> OpCall:
        spec = slot_specs(cut.whole)[scores]
        dim, operand = min(1, len(spec.shape) - 1), slots(cut.whole)[scores]
        if cut.signature.operands[operand] != Split(dim):
            return local
        kept, before = local.args, 0
        if local.op == op:
            kept, before = local.args[:-1], argument(local, len(local.args) - 1)
        offset = before + cut.operand_range(operand, dim)[0]
        return OpCall(op, (*kept, offset), (), local.operands, local.results)

    return adapt


rule(
    (*aten("nll_loss_forward nll_loss2d_forward"), NLL_SHARD),
    _forward,
    adapt=_on_shard(NLL_SHARD, 0),
)
rule(
    (*aten("nll_loss_backward nll_loss2d_backward"), NLL_GRADIENT_SHARD),
    _backward,
    linear=FIRST,
    # Only a mean's gradient looks at the total weight.
    ignored=lambda call: () if argument(call, 4, "reduction", MEAN) == MEAN else (6,),
    adapt=_on_shard(NLL_GRADIENT_SHARD, 1),
)


def _sum_exp(call: OpCall) -> Factors:
    """Sums along one dimension; the maxima have one element there."""
    rank, dim = len(call.operands[0].shape), argument(call, 2, "dim")
    names = numbered(rank)
    row = tuple(WHOLE if number == dim else name for number, name in enumerate(names))
    return Factors((names, row), (row,), frozenset((names[dim],)))


def _class_loss(call: OpCall) -> Factors:
    results = tuple(_target_dims(shape_of(spec)) for spec in call.results)
    contracted = frozenset("c") if argument(call, 3) == NONE else frozenset("nc")
    return Factors((("n", "c"), ("n", WHOLE), ("n",)), results, contracted)


def _class_loss_backward(call: OpCall) -> Factors:
    gradient = _target_dims(slot_specs(call)[0].shape)
    return Factors((gradient, ("n", "c"), ("n", WHOLE), ("n",)), (("n", "c"),))


def _from_first_class(scores: int) -> Adapt:
    """The last argument is the number of the first class of the scores, the tensor in slot `scores`."""

    def adapt(local: OpCall, cut: Cut) -> OpCall:
        operand = slots(cut.whole)[scores]
        if cut.signature.operands[operand] != Split(1):
            return local
        offset = argument(local, len(local.args) - 1) + cut.operand_range(operand, 1)[0]
        return replace(local, args=(*local.args[:-1], offset))

    return adapt


# What a cross-entropy that is split by classes becomes (`weft.compiler.families.class_loss`).
rule("weft.sum_exp", _sum_exp)
rule("weft.class_loss", _class_loss, adapt=_from_first_class(0))
rule(
    "weft.class_loss_backward",
    _class_loss_backward,
    linear=FIRST,
    adapt=_from_first_class(1),
)
