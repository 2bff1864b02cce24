"""Linear algebra: every matrix stays whole, batches of matrices may be split; so may columns of right-hand sides."""

from __future__ import annotations

from weft.ops.call import OpCall, TensorSpec, slot_specs
from weft.ops.factors import WHOLE, Dims, Factors, whole_factors
from weft.ops.rule import RuleOptions, aten, rule
from weft.ops.rules.common import EITHER, FIRST, aligned, numbered

SECOND = ((1,),)


def _batch(spec: TensorSpec | None, inner: int, batch: tuple[int, ...]) -> Dims:
    """The factors of a tensor whose last `inner` dimensions are whole and whose others broadcast to `batch`."""
    if spec is None:
        return ()
    inner = min(inner, len(spec.shape))
    outer = spec.shape[: len(spec.shape) - inner]
    return aligned(outer, batch) + (WHOLE,) * inner


rule(aten("_linalg_eigh linalg_eig"), "... 1 1 -> ... 1, ... 1 1")
rule(aten("_linalg_svd"), "... 1 1 -> ... 1 1, ... 1, ... 1 1")
rule(aten("linalg_qr"), "... 1 1 -> ... 1 1, ... 1 1")
rule(aten("linalg_lu"), "... 1 1 -> ... 1 1, ... 1 1, ... 1 1")
rule(aten("linalg_lu_factor_ex linalg_ldl_factor_ex"), "... 1 1 -> ... 1 1, ... 1, ...")
rule(aten("lu_unpack"), "... 1 1, ... 1 -> ... 1 1, ... 1 1, ... 1 1")
rule(aten("linalg_cholesky_ex linalg_inv_ex"), "... 1 1 -> ... 1 1, ...")
rule(aten("_linalg_det"), "... 1 1 -> ..., ... 1 1, ... 1")
rule(aten("_linalg_slogdet"), "... 1 1 -> ..., ..., ... 1 1, ... 1")
rule(aten("linalg_matrix_exp cholesky_inverse"), "... 1 1 -> ... 1 1")
rule(aten("cholesky_solve"), "... 1 n, ... 1 1 -> ... 1 n", linear=((0,),))
rule(aten("linalg_householder_product"), "... 1 1, ... 1 -> ... 1 1")


@rule(aten("linalg_solve_triangular"), linear=SECOND)
def _triangular(call: OpCall) -> Factors:
    """`linalg_solve_triangular`: by batch, and by the dimension of the right-hand side that the matrix leaves alone."""
    matrix, right = slot_specs(call)
    result = call.results[0]
    assert result is not None  # it makes one tensor
    left = bool(dict(call.kwargs).get("left", True))
    batch = result.shape[:-2]
    free: Dims = (WHOLE, "n") if left else ("n", WHOLE)
    outer = aligned(right.shape[:-2], batch)
    return Factors((_batch(matrix, 2, batch), (*outer, *free)), ((*numbered(len(batch)), *free),))


@rule(aten("_linalg_solve_ex"))
def _solve(call: OpCall) -> Factors:
    """`linalg_solve_ex`: by batch, where both sides have the same, and by columns of a matrix on the right.

    Every rank factorizes the matrices for its columns. Other right sides stay whole: torch takes one
    for a batch of vectors when its shape is that of the batch, which a shard's may be by chance.
    """
    matrix, right = slot_specs(call)
    batch = matrix.shape[:-2]
    vectors = len(right.shape) == 1 or right.shape == matrix.shape[:-1]
    outer = right.shape[: -1 if vectors else -2]
    if outer != batch:
        return whole_factors(call)
    inner: Dims = (WHOLE,) if vectors else (WHOLE, "n")
    _, factors, pivots, info = call.results
    kept = ((factors, 2), (pivots, 1), (info, 0))
    return Factors(
        (_batch(matrix, 2, batch), (*aligned(outer, batch), *inner)),
        (
            (*numbered(len(batch)), *inner),
            *(_batch(spec, whole, batch) for spec, whole in kept),
        ),
    )


@rule("weft.lstsq")
def _least_squares(call: OpCall) -> Factors:
    """`weft.lstsq`: by batch; results of shape [0] are those that the driver does not make."""
    matrix, right = slot_specs(call)
    batch = numbered(len(matrix.shape) - 2)

    def dims(spec: TensorSpec | None) -> Dims:
        shape = spec.shape if spec else ()
        return (*batch, *(WHOLE,) * (len(shape) - len(batch))) if shape != (0,) else (WHOLE,)

    return Factors((dims(matrix), dims(right)), tuple(map(dims, call.results)))


@rule("weft.checked", linear=FIRST, monotone=FIRST, view=True)
def _checked(call: OpCall) -> Factors:
    """A result by all of its dimensions; the error codes by those of the batch."""
    result, codes = call.operands
    names = numbered(len(result.shape))
    return Factors((names, names[: len(codes.shape)]), (names,))


BIASED: RuleOptions = {"linear": ((0, 1), (0, 2)), "added": (0,)}

# `weft.class_scores` is what a product that makes split logits becomes (`weft.compiler.decompositions.fused_losses`).
rule((*aten("mm"), "weft.class_scores"), "m k+, k n -> m n", linear=EITHER)
rule(aten("bmm"), "b m k+, b k n -> b m n", linear=EITHER)
rule(aten("matmul"), "... m k+, ... k n -> ... m n", linear=EITHER)
rule(aten("addmm"), "m n, m k+, k n -> m n", **BIASED)
rule(aten("baddbmm"), "b m n, b m k+, b k n -> b m n", **BIASED)
rule(aten("addmv"), "m, m k+, k -> m", **BIASED)
rule(aten("dot vdot"), "k+, k -> ", linear=EITHER)
rule(aten("mv"), "m k+, k -> m", linear=EITHER)
rule(aten("outer"), "m, n -> m n", linear=EITHER)
rule(aten("linear"), "... k+, n k, n -> ... n", linear=((0, 2), (1, 2)), added=(2,))
rule(aten("_cdist_forward"), "... m 1, ... n 1 -> ... m n")
rule(aten("_cdist_backward"), "... m n+, ... m 1, ... n 1, _, ... m n -> ... m 1", linear=((0,),))
