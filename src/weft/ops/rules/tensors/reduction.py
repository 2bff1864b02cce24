"""Reductions: sums and extrema contract the dimensions they reduce; everything else keeps them whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.layout import Reduction
from weft.ops.arguments import argument, normal_dim, normal_dims, slot_specs
from weft.ops.call import OpCall
from weft.ops.factors import WHOLE, Dims, Factors
from weft.ops.rule import aten, rule
from weft.ops.rules.common import EITHER, FIRST, like_first, numbered, pointwise, shape_of


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


def _over(position: int, contracted: bool = False, default: Any = None) -> Callable[..., Factors]:
    """Factors of a reduction whose dimensions stand at `position` (None or () means all)."""

    def factors(call: OpCall) -> Factors:
        dims = argument(call, position, "dim", default)
        rank = len(call.operands[0].shape)
        return _reduce(call, normal_dims(dims, rank), contracted)

    return factors


def _transformed(call: OpCall) -> Factors:
    names = numbered(len(call.operands[0].shape))
    whole = frozenset(f"d{i}" for i in normal_dims(argument(call, 1, "dim"), len(names)))
    return Factors((names,), (names,), whole=whole)


def _crossed(call: OpCall) -> Factors:
    bound = pointwise(call)
    rank = len(shape_of(call.results[0]))
    dim = normal_dim(argument(call, 2, "dim", -1), rank)
    return Factors(bound.operands, bound.results, whole=frozenset((f"d{dim}",)))


def _over_all(contracted: bool) -> Callable[..., Factors]:
    return lambda call: _reduce(call, normal_dims(None, len(call.operands[0].shape)), contracted)


def along(position: int, default: int = -1) -> Callable[..., Factors]:
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


def _sort_stable(call: OpCall) -> Factors:
    """The dimension is given by name, behind `stable`."""
    dim: Any = dict(call.kwargs).get("dim", -1)
    names = numbered(len(call.operands[0].shape))
    whole = frozenset((f"d{normal_dim(dim, len(names))}",))
    return Factors((names,), (names, names), whole=whole)


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
rule(aten("sort.stable"), _sort_stable)
rule(aten("topk"), along(2))
rule(aten("_softmax_backward_data _log_softmax_backward_data"), along(2), linear=FIRST)
rule(aten("glu"), along(1))
rule(aten("glu_backward"), along(2), linear=FIRST)
rule(aten("kthvalue"), _over(2, default=-1))
rule(aten("mode"), _over(1, default=-1))
rule(aten("_fft_r2c _fft_c2c _fft_c2r"), _transformed, linear=FIRST)
rule(aten("linalg_cross"), _crossed, linear=EITHER)
