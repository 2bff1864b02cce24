"""Element-wise ops: every dimension may be split, and tensors broadcast as torch does."""

from __future__ import annotations

from collections.abc import Callable

from weft.layout import Split
from weft.ops.arguments import argument, operand_indices, slot_specs, with_arguments
from weft.ops.call import OpCall
from weft.ops.cost import holds
from weft.ops.factors import WHOLE, Factors, whole_factors
from weft.ops.rule import Adapt, Cut, Groups, aten, resized, rule
from weft.ops.rules.common import EITHER, FIRST, TOGETHER, numbered, pointwise, shape_of

SPECIAL = """
    polygamma special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_erfcx special_i0e special_i1 special_i1e special_modified_bessel_i0 special_modified_bessel_i1
    special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
    special_scaled_modified_bessel_k1 special_spherical_bessel_j0 frexp.Tensor"""

# Two arguments that broadcast; each polynomial of degree `n` at `x`.
SPECIAL_BINARY = """
    gcd lcm nextafter special_chebyshev_polynomial_t special_chebyshev_polynomial_u
    special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_hermite_polynomial_h
    special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_zeta"""


COPIES = "clone lift_fresh_copy"
# Of operands that lie as they should, they are the operand itself.
IDENTITIES = "alias contiguous detach positive"

# Increasing everywhere: the largest of many stays the largest. (A logarithm has no value below
# zero.)
INCREASING = """
    asinh atan ceil clamp elu erf exp exp2 expm1 floor hardsigmoid hardtanh relu relu6 round
    round.decimals selu sigmoid sign sinh softplus tanh trunc"""

UNARY = """
    abs acos acosh angle asin atanh bitwise_not celu cos cosh digamma erfc erfinv frac gelu hardshrink
    hardswish isfinite isinf isnan isneginf isposinf leaky_relu lgamma log log10 log1p log2 log_sigmoid_forward
    logical_not
    logit mish nan_to_num reciprocal rsqrt sgn signbit silu sin sinc softshrink sqrt square tan threshold"""

BINARY = """
    atan2 bitwise_and.Scalar bitwise_and.Tensor bitwise_left_shift.Tensor
    bitwise_left_shift.Tensor_Scalar bitwise_or.Scalar bitwise_or.Tensor bitwise_right_shift.Tensor
    bitwise_right_shift.Tensor_Scalar bitwise_xor.Scalar bitwise_xor.Tensor clamp.Tensor
    clamp_max clamp_max.Tensor clamp_min clamp_min.Tensor complex copysign.Scalar copysign.Tensor div.Scalar_mode
    div.Tensor_mode eq.Scalar eq.Tensor floor_divide fmod.Scalar fmod.Tensor ge.Scalar ge.Tensor
    gt.Scalar gt.Tensor heaviside hypot igamma igammac le.Scalar le.Tensor logaddexp logaddexp2 logical_and logical_or
    logical_xor lt.Scalar lt.Tensor ne.Scalar ne.Tensor polar pow.Scalar pow.Tensor_Scalar
    pow.Tensor_Tensor remainder.Scalar remainder.Scalar_Tensor remainder.Tensor xlogy.Scalar_Other
    xlogy.Scalar_Self xlogy.Tensor _prelu_kernel"""

# Gradients: linear in what comes back from above.
BACKWARD = """
    elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
    leaky_relu_backward log_sigmoid_backward logit_backward mish_backward native_dropout_backward
    sigmoid_backward silu_backward softplus_backward softshrink_backward tanh_backward threshold_backward
    _prelu_kernel_backward"""


def _ordered(source: int) -> Callable[[OpCall], Groups]:
    """The largest passes rounding; it does not pass where numbers wrap around, or infinity has no place."""

    def groups(call: OpCall) -> Groups:
        result, given = _dtypes(call, source)
        rounds = "float" in result and not given.startswith("complex")
        return ((source,),) if rounds or holds(result, given) else ()

    return groups


def _dtypes(call: OpCall, source: int) -> tuple[str, str]:
    """The dtypes of the result and of the argument at a position."""
    operand = next(operand_indices(call.args[source]))
    result = call.results[0]
    return result.dtype if result else "", call.operands[operand].dtype


rule(aten(COPIES), pointwise, linear=FIRST, monotone=FIRST)
rule(aten(IDENTITIES), pointwise, linear=FIRST, monotone=FIRST, shares=True)
rule(aten(INCREASING), pointwise, monotone=FIRST)
rule(aten(UNARY), pointwise)
rule(aten(BINARY), pointwise)
rule(aten(BACKWARD), pointwise, linear=FIRST)
rule(aten("_conj_physical deg2rad neg rad2deg"), pointwise, linear=FIRST)
rule(aten("_conj conj_physical"), pointwise, linear=FIRST, shares=True)
rule(
    (*aten("_to_copy"), "prims.convert_element_type.default"),
    pointwise,
    linear=FIRST,
    monotone=_ordered(0),
)

rule(
    aten("add.Scalar add.Tensor sub.Scalar sub.Tensor"), pointwise, linear=TOGETHER, monotone=FIRST
)
rule(aten("rsub.Scalar rsub.Tensor"), pointwise, linear=TOGETHER)
rule(aten("mul.Scalar mul.Tensor"), pointwise, linear=EITHER)
rule(aten("div.Scalar div.Tensor true_divide.Tensor"), pointwise, linear=FIRST)
rule(aten("maximum minimum fmax fmin max.other min.other"), pointwise, monotone=EITHER)
rule(aten("addcmul"), pointwise, linear=((0, 1), (0, 2)))
rule(aten("addcdiv lerp.Scalar lerp.Tensor"), pointwise, linear=TOGETHER)
rule(aten("copy"), pointwise, linear=((1,),), monotone=_ordered(1), ignored=(0,))
rule(
    aten("where.self where.Scalar where.ScalarOther where.ScalarSelf"),
    pointwise,
    linear=((1, 2),),
    monotone=((1,), (2,), (1, 2)),
)
rule(aten("masked_fill.Scalar masked_fill.Tensor"), pointwise, linear=((0, 2),), monotone=FIRST)


rule(aten(SPECIAL), pointwise)
rule(aten(SPECIAL_BINARY), pointwise)


UNIFORM = "weft.uniform"
HINT = "weft.hint"


def _made(call: OpCall) -> Factors:
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
