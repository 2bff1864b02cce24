"""Losses: a sum contracts the batch, a mean needs it whole (capture writes a mean as sum / count)."""

from __future__ import annotations

from collections.abc import Callable

from weft.ops.arguments import argument, slot_specs
from weft.ops.call import OpCall
from weft.ops.factors import Factors, bind, whole_factors
from weft.ops.rule import aten, rule
from weft.ops.rules.common import FIRST, like_first, numbered, shape_of

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for reduction=
CTC, CTC_BACKWARD = "weft.ctc_loss", "weft.ctc_loss_backward"


def _marked(factors: Factors, reduction: int) -> Factors:
    names = frozenset(factors.names)
    contracted = names if reduction == SUM else frozenset()
    whole = factors.whole | (names if reduction == MEAN else frozenset())
    return Factors(factors.operands, factors.results, contracted - factors.whole, whole)


def _elementwise(position: int) -> Callable[[OpCall], Factors]:
    """Factors of an element-wise loss whose reduction stands at `position`."""

    def factors(call: OpCall) -> Factors:
        return _marked(like_first(call), argument(call, position, "reduction", MEAN))

    return factors


def _elementwise_backward(position: int) -> Callable[[OpCall], Factors]:
    """Factors of the gradient: nothing is contracted, and only a mean looks at the number of elements."""

    def factors(call: OpCall) -> Factors:
        names = numbered(len(shape_of(call.results[0])))
        operands = tuple(names[len(names) - len(spec.shape) :] for spec in slot_specs(call))
        mean = argument(call, position, "reduction", MEAN) == MEAN
        return Factors(operands, (names,), whole=frozenset(names) if mean else frozenset())

    return factors


def _rows(text: str, position: int) -> Callable[[OpCall], Factors]:
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
