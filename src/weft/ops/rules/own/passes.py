"""Ops that passes put into the graph: for clipping, loss scaling, sharding, recompute, offload, micro-batches."""

from __future__ import annotations

from weft.ops.arguments import argument, normal_dim, slot_specs
from weft.ops.call import OpCall
from weft.ops.factors import WHOLE, Factors, whole_factors
from weft.ops.rule import rule
from weft.ops.rules.common import FIRST, except_dims, no_work, numbered, pointwise


def _first_alone(call: OpCall) -> Factors:
    """Every dimension of the first operand is a factor; the second has none."""
    names = numbered(len(slot_specs(call)[0].shape))
    return Factors((names, (WHOLE,) * len(slot_specs(call)[1].shape)), (names,))


# The sum of the squares of all elements; whether an element is no finite number, 0.0 or 1.0. They
# count as no work, so that they look at a gradient where it lies: cutting it would save little and
# cost a collective.
rule("weft.square_sum", "...+ -> ", flops=no_work, traffic=no_work)
rule("weft.nonfinite", "...+ -> ", reduction="max", flops=no_work, traffic=no_work)
# A tensor times a number that is a tensor: what becomes of a gradient stays a gradient.
rule("weft.scale", pointwise, linear=FIRST)
# Conversions of what is added up: of each part of a sum, as the user has allowed it; of the whole sum.
rule("weft.cast_parts", pointwise, linear=FIRST, lossy=True)
rule("weft.cast_whole", pointwise)
# Numbers of the step, the same on all ranks.
rule("weft.clip_factor", whole_factors)
rule("weft.next_scale", whole_factors)
# A parameter for one group of its readers, in each micro-batch; lies as its text says.
rule("weft.take", pointwise, linear=FIRST, monotone=FIRST, view=True)
# A copy in host memory, and one on the device again that waits for another value; never split anew.
rule("weft.offload", whole_factors)
rule("weft.load", whole_factors)
# The first operand, but not before the second is there.
rule(
    "weft.after",
    _first_alone,
    linear=FIRST,
    monotone=FIRST,
    anyhow=(1,),
    view=True,
    traffic=no_work,
)
# The first operand, where the second is true; else the rank raises.
rule("weft.required", _first_alone, linear=FIRST, monotone=FIRST, view=True, traffic=no_work)


def _along(call: OpCall) -> Factors:
    """The dimension is whole: balanced shards of the whole are not those of its parts."""
    rank = len(call.operands[0].shape)
    names = except_dims(rank, {normal_dim(argument(call, 1, "dim"), rank)})
    return Factors((names,), (names,))


# The reduction of a value over all micro-batches; their concatenation along a dimension. Views, so
# that ranks without elements run them as well: what they make is made once a step.
# A sum over micro-batches may come before the sum over ranks.
rule(
    "weft.accumulate",
    pointwise,
    linear=lambda call: FIRST if argument(call, 1, "reduction") == "sum" else (),
    view=True,
)
rule("weft.pack", _along, linear=FIRST, monotone=FIRST, view=True)
# A micro-batch's part of a value of the step (the offset varies).
rule("weft.slice", _along, linear=FIRST, monotone=FIRST, view=True)
# A value of the step as every micro-batch reads it (the second argument varies).
rule("weft.use", pointwise, linear=FIRST, monotone=FIRST, view=True)
