"""Element-wise ops: every dimension may be split, and tensors broadcast as torch does. Reductions: sums and extrema
contract the dimensions that they reduce; everything else keeps them whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.layout import Reduction, Split
from weft.ops.call import (
    OpCall,
    argument,
    normal_dim,
    normal_dims,
    operand_indices,
    slot_specs,
    with_arguments,
)
from weft.ops.cost import holds
from weft.ops.factors import WHOLE, Dims, Factors, whole_factors
from weft.ops.rule import Adapt, Cut, FindFactors, Groups, aten, resized, rule
from weft.ops.rules.common import EITHER, FIRST, TOGETHER, like_first, numbered, pointwise, shape_of

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
# Their result is the operand itself where its layout is the one asked for.
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


def _reduced(rank: int, results: tuple[int, ...], dims: frozenset[int]) -> Dims:
    """The factors of a result, whether the reduced dimensions are kept with size 1 or not."""
    kept = len(results) == rank
    return tuple(WHOLE if i in dims else f"d{i}" for i in range(rank) if i not in dims or kept)


def _reduce(call: OpCall, dims: frozenset[int], contracted: bool) -> Factors:
    rank = len(call.operands[0].shape)
    reduced = frozenset(f"d{i}" for i in dims)
    return Factors(
        (numbered(rank),),
        tuple(_reduced(rank, shape_of(spec), dims) for spec in call.results),
        contracted=reduced if contracted else frozenset(),
        whole=frozenset() if contracted else reduced,
    )


def _over(position: int, contracted: bool = False, default: Any = None) -> FindFactors:
    """Factors of a reduction whose dimensions are at `position` (None or () means all)."""

    def factors(call: OpCall) -> Factors:
        dims = argument(call, position, "dim", default)
        rank = len(call.operands[0].shape)
        return _reduce(call, normal_dims(dims, rank), contracted)

    return factors


def _over_all(contracted: bool) -> FindFactors:
    return lambda call: _reduce(call, normal_dims(None, len(call.operands[0].shape)), contracted)


def along(position: int, default: int = -1) -> FindFactors:
    """Factors of an op that works along one dimension and keeps it whole, such as softmax, cumsum or sort.

    All tensors have the rank of the first; a result may have another size along that dimension.
    """

    def factors(call: OpCall) -> Factors:
        dim = argument(call, position, "dim", default)
        whole = like_first(call) if dim is None else None
        if whole is not None:
            return Factors(whole.operands, whole.results, whole=frozenset(whole.names))
        rank = len(call.operands[0].shape)
        names = numbered(rank)
        return Factors(
            tuple(names[: len(spec.shape)] for spec in slot_specs(call)),
            tuple(names[: len(shape_of(spec))] for spec in call.results),
            whole=frozenset((f"d{normal_dim(dim, rank)}",)),
        )

    return factors


rule(aten("sum"), _over_all(True), linear=FIRST)
rule(aten("sum.dim_IntList"), _over(1, True), linear=FIRST)
rule(aten("mean"), _over_all(False), linear=FIRST)
rule(aten("mean.dim"), _over(1), linear=FIRST)

EXTREMA: tuple[tuple[Reduction, str, str], ...] = (
    ("max", "max", "amax"),
    ("min", "min", "amin"),
)
for _reduction, _all, _dims in EXTREMA:
    rule(aten(_all), _over_all(True), monotone=FIRST, reduction=_reduction, extrema=(_reduction,))
    rule(aten(_dims), _over(1, True), monotone=FIRST, reduction=_reduction, extrema=(_reduction,))

rule(aten("nansum count_nonzero count_nonzero.dim_IntList"), _over(1, True))
rule(aten("median nanmedian"), _over_all(False))
rule(aten("any"), _over_all(True), reduction="or")
rule(aten("any.dim any.dims"), _over(1, True), reduction="or")
rule(aten("all"), _over_all(True), reduction="and")
rule(aten("all.dim all.dims"), _over(1, True), reduction="and")
rule(aten("prod"), _over_all(True), reduction="prod")
rule(aten("prod.dim_int"), _over(1, True), reduction="prod")
rule(aten("std var"), _over_all(False))
rule(
    aten("max.dim min.dim median.dim nanmedian.dim argmax argmin"),
    _over(1),
)
rule(aten("logsumexp var.correction var.dim std.correction std.dim"), _over(1))
rule(aten("var_mean.correction var_mean.dim std_mean.correction"), _over(1))
rule(aten("linalg_vector_norm norm.ScalarOpt_dim"), _over(2))
rule(aten("norm.Scalar"), _over_all(False))

rule(aten("cumsum"), along(1), linear=FIRST)
rule(
    aten("cumprod logcumsumexp cummax cummin _softmax _log_softmax _safe_softmax argsort"), along(1)
)
rule(aten("sort"), along(1))


@rule(aten("sort.stable"))
def _sort_stable(call: OpCall) -> Factors:
    """The dimension is given by name, behind `stable`."""
    dim: Any = dict(call.kwargs).get("dim", -1)
    names = numbered(len(call.operands[0].shape))
    whole = frozenset((f"d{normal_dim(dim, len(names))}",))
    return Factors((names,), (names, names), whole=whole)


rule(aten("topk"), along(2))
rule(aten("_softmax_backward_data _log_softmax_backward_data"), along(2), linear=FIRST)
rule(aten("glu"), along(1))
rule(aten("glu_backward"), along(2), linear=FIRST)
rule(aten("kthvalue"), _over(2, default=-1))
rule(aten("mode"), _over(1, default=-1))


@rule(aten("_fft_r2c _fft_c2c _fft_c2r"), linear=FIRST)
def _transformed(call: OpCall) -> Factors:
    names = numbered(len(call.operands[0].shape))
    whole = frozenset(f"d{i}" for i in normal_dims(argument(call, 1, "dim"), len(names)))
    return Factors((names,), (names,), whole=whole)


@rule(aten("linalg_cross"), linear=EITHER)
def _crossed(call: OpCall) -> Factors:
    bound = pointwise(call)
    rank = len(shape_of(call.results[0]))
    dim = normal_dim(argument(call, 2, "dim", -1), rank)
    return Factors(bound.operands, bound.results, whole=frozenset((f"d{dim}",)))
