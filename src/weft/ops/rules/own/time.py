"""Ops between a micro-batch and the step: values made once per micro-batch, and values made once a step."""

from __future__ import annotations

from weft.ops.arguments import argument, normal_dim
from weft.ops.call import OpCall
from weft.ops.factors import Factors
from weft.ops.rule import Groups, rule
from weft.ops.rules.common import FIRST, except_dims, pointwise


def _sums(call: OpCall) -> Groups:
    """A sum over micro-batches may come before the sum over ranks."""
    return FIRST if argument(call, 1, "reduction") == "sum" else ()


def _along(call: OpCall) -> Factors:
    """The dimension is whole: balanced shards of the whole are not those of its parts."""
    rank = len(call.operands[0].shape)
    names = except_dims(rank, {normal_dim(argument(call, 1, "dim"), rank)})
    return Factors((names,), (names,))


# The reduction of a value over all micro-batches; their concatenation along a dimension. Views, so
# that ranks without elements run them as well: what they make is made once a step.
rule("weft.accumulate", pointwise, linear=_sums, view=True)
rule("weft.pack", _along, linear=FIRST, monotone=FIRST, view=True)
# A micro-batch's part of a value of the step (the offset varies).
rule("weft.slice", _along, linear=FIRST, monotone=FIRST, view=True)
# A value of the step as every micro-batch reads it (the second argument varies).
rule("weft.use", pointwise, linear=FIRST, monotone=FIRST, view=True)
