"""Ops that make tensors from nothing: every dimension may be split, by making less."""

from __future__ import annotations

from weft.layout import Split
from weft.ops.arguments import argument, slot_specs, with_arguments
from weft.ops.call import OpCall
from weft.ops.factors import WHOLE, Factors, whole_factors
from weft.ops.rule import Adapt, Cut, aten, resized, rule
from weft.ops.rules.common import FIRST, numbered, pointwise, shape_of

UNIFORM = "weft.uniform"
HINT = "weft.hint"


def _made(call: OpCall) -> Factors:
    """Operands only lend their dtype and device."""
    operands = tuple((WHOLE,) * len(spec.shape) for spec in slot_specs(call))
    return Factors(operands, (numbered(len(shape_of(call.results[0]))),))


def _adapt_arange(start: int | None, step: int | None) -> Adapt:
    """A piece of a range is a range; positions of start and step in the arguments."""

    def adapt(local: OpCall, cut: Cut) -> OpCall:
        if not isinstance(cut.signature.results[0], Split):
            return local
        first = argument(cut.whole, start, default=0) if start is not None else 0
        pace = argument(cut.whole, step, default=1) if step is not None else 1
        offset, length = cut.result_range(0)
        begin = first + offset * pace
        args = (begin, begin + length * pace, pace)
        return OpCall("aten.arange.start_step", args, local.kwargs, (), local.results)

    return adapt


def _arange(call: OpCall) -> Factors:
    """Ranges of floats stay whole: their pieces would be rounded otherwise."""
    exact = all(isinstance(value, int) for value in call.args)
    return Factors((), (("d0",) if exact else (WHOLE,),))


def _adapt_uniform(local: OpCall, cut: Cut) -> OpCall:
    ranges = [cut.result_range(dim) for dim in range(len(shape_of(local.results[0])))]
    before = argument(cut.whole, 1, "offset")
    offset = tuple(old + new for old, (new, _) in zip(before, ranges, strict=True))
    return with_arguments(local, {1: offset, 2: tuple(length for _, length in ranges)})


rule(aten("full zeros ones empty.memory_format"), _made, adapt=resized(0))
rule(aten("new_zeros new_ones new_empty new_full"), _made, adapt=resized(1), ignored=(0,))
rule(
    aten("zeros_like ones_like full_like empty_like fill.Scalar zero"),
    pointwise,
    ignored=(0,),
)
rule(aten("fill.Tensor"), pointwise, linear=((1,),), ignored=(0,))
rule(aten("scalar_tensor eye eye.m"), whole_factors)
rule(aten("arange"), _arange, adapt=_adapt_arange(None, None))
rule(aten("arange.start"), _arange, adapt=_adapt_arange(0, None))
rule(aten("arange.start_step"), _arange, adapt=_adapt_arange(0, 2), places=(0, 1))
rule(UNIFORM, _made, adapt=_adapt_uniform)
rule(HINT, pointwise, linear=FIRST, monotone=FIRST, view=True)
