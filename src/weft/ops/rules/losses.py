"""Losses: a sum contracts the batch, a mean needs it whole (capture writes a mean as sum / count)."""

from __future__ import annotations

from dataclasses import replace

from weft.layout import Split
from weft.ops.call import OpCall, argument, slot_specs, slots
from weft.ops.factors import WHOLE, Dims, Factors, bind, whole_factors
from weft.ops.rule import Adapt, Cut, FindFactors, aten, rule
from weft.ops.rules.common import FIRST, like_first, numbered, shape_of

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for reduction=
CTC, CTC_BACKWARD = "weft.ctc_loss", "weft.ctc_loss_backward"


def _marked(factors: Factors, reduction: int) -> Factors:
    names = frozenset(factors.names)
    contracted = names if reduction == SUM else frozenset()
    whole = factors.whole | (names if reduction == MEAN else frozenset())
    return Factors(factors.operands, factors.results, contracted - factors.whole, whole)


def _elementwise(position: int) -> FindFactors:
    """Factors of an element-wise loss whose reduction is at `position`."""

    def factors(call: OpCall) -> Factors:
        return _marked(like_first(call), argument(call, position, "reduction", MEAN))

    return factors


def _elementwise_backward(position: int) -> FindFactors:
    """Factors of the gradient: nothing is contracted, and only a mean looks at the number of elements."""

    def factors(call: OpCall) -> Factors:
        names = numbered(len(shape_of(call.results[0])))
        operands = tuple(names[len(names) - len(spec.shape) :] for spec in slot_specs(call))
        mean = argument(call, position, "reduction", MEAN) == MEAN
        return Factors(operands, (names,), whole=frozenset(names) if mean else frozenset())

    return factors


def _rows(text: str, position: int) -> FindFactors:
    """Factors of a loss of rows of classes, and of its gradient, without reduction; with one it is whole."""

    def factors(call: OpCall) -> Factors:
        reduced = argument(call, position, "reduction", MEAN) != NONE
        return whole_factors(call) if reduced else bind(text, call)

    return factors


rule(aten("mse_loss"), _elementwise(2))
rule(aten("smooth_l1_loss huber_loss"), _elementwise(2))
rule(aten("binary_cross_entropy"), _elementwise(3))
rule(aten("binary_cross_entropy_with_logits"), _elementwise(4))
rule(aten("soft_margin_loss"), _elementwise(2))
rule(
    aten("mse_loss_backward smooth_l1_loss_backward huber_loss_backward"),
    _elementwise_backward(3),
    linear=FIRST,
)
rule(aten("binary_cross_entropy_backward"), _elementwise_backward(4), linear=FIRST)
rule(aten("soft_margin_loss_backward"), _elementwise_backward(3), linear=FIRST)
rule(aten("multi_margin_loss"), _rows("n c!, n, _, _, c! -> n", 5))
rule(aten("multi_margin_loss_backward"), _rows("n, n c!, n, _, _, c! -> n c!", 6), linear=FIRST)
# The table that the backward reads: [n, steps, twice the longest target and one].
rule(CTC, "1 n 1, n 1, n, n -> n, n 1 1", kept=(1,), readers=(CTC_BACKWARD,))
rule(CTC_BACKWARD, "n, 1 n 1, n 1, n, n, n, n 1 1 -> 1 n 1")
rule(aten("multilabel_margin_loss_forward"), _rows("n c!, n c! -> n, n c!", 2))
rule(
    aten("multilabel_margin_loss_backward"),
    _rows("n, n c!, n c!, _, n c! -> n c!", 3),
    linear=FIRST,
)


# The cross-entropy's negative log-likelihood, also split by classes: each rank picks the targets among its own.
#
# A target of another rank's classes counts as ignored; losses and weights add up over the ranks. The
# log-softmax in front is split by classes in `weft.compiler.decompositions.log_softmax`.


NLL_SHARD = "weft.nll_loss_shard"
NLL_GRADIENT_SHARD = "weft.nll_loss_backward_shard"


def _class_dims(shape: tuple[int, ...]) -> Dims:
    """Factors of scores: (classes), (batch, classes) or (batch, classes, height, width)."""
    return ("c",) if len(shape) == 1 else ("n", "c", "y", "x")[: len(shape)]


def _target_dims(shape: tuple[int, ...]) -> Dims:
    return ("n", "y", "x")[: len(shape)]


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


@rule(
    (*aten("nll_loss_forward nll_loss2d_forward"), NLL_SHARD),
    adapt=_on_shard(NLL_SHARD, 0),
)
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


@rule(
    (*aten("nll_loss_backward nll_loss2d_backward"), NLL_GRADIENT_SHARD),
    linear=FIRST,
    # Only a mean's gradient looks at the total weight.
    ignored=lambda call: () if argument(call, 4, "reduction", MEAN) == MEAN else (6,),
    adapt=_on_shard(NLL_GRADIENT_SHARD, 1),
)
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


def _from_first_class(scores: int) -> Adapt:
    """The last argument is the number of the first class of the scores, the tensor in slot `scores`."""

    def adapt(local: OpCall, cut: Cut) -> OpCall:
        operand = slots(cut.whole)[scores]
        if cut.signature.operands[operand] != Split(1):
            return local
        offset = argument(local, len(local.args) - 1) + cut.operand_range(operand, 1)[0]
        return replace(local, args=(*local.args[:-1], offset))

    return adapt


# The ops of a cross-entropy split by classes (`weft.compiler.decompositions.fused_losses`).


@rule("weft.sum_exp")
def _sum_exp(call: OpCall) -> Factors:
    """Sums along one dimension; the maxima have one element there."""
    rank, dim = len(call.operands[0].shape), argument(call, 2, "dim")
    names = numbered(rank)
    row = tuple(WHOLE if number == dim else name for number, name in enumerate(names))
    return Factors((names, row), (row,), frozenset((names[dim],)))


@rule("weft.class_loss", adapt=_from_first_class(0))
def _class_loss(call: OpCall) -> Factors:
    results = tuple(_target_dims(shape_of(spec)) for spec in call.results)
    contracted = frozenset("c") if argument(call, 3) == NONE else frozenset("nc")
    return Factors((("n", "c"), ("n", WHOLE), ("n",)), results, contracted)


@rule(
    "weft.class_loss_backward",
    linear=FIRST,
    adapt=_from_first_class(1),
)
def _class_loss_backward(call: OpCall) -> Factors:
    gradient = _target_dims(slot_specs(call)[0].shape)
    return Factors((gradient, ("n", "c"), ("n", WHOLE), ("n",)), (("n", "c"),))
