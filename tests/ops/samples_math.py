"""Sample calls of linear algebra and special functions."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ops.draw import aten, b, f, i
from tools.oracles.rules import TorchCall, torch_call
from weft.ops.rules.pointwise import SPECIAL, SPECIAL_BINARY


def linear_algebra() -> Iterator[TorchCall]:
    matrix, right = f(5, 3, 3), f(5, 3, 4)
    symmetric = matrix @ matrix.mT + torch.eye(3, dtype=torch.float64)
    lower = torch.linalg.cholesky(symmetric)
    yield aten("_linalg_eigh", symmetric)
    yield aten("_linalg_eigh", symmetric, "L", False)
    yield aten("linalg_eig", matrix)
    yield aten("_linalg_svd", f(5, 3, 4), True)
    yield aten("_linalg_svd", f(4, 3), False, False)
    for name in ("linalg_qr", "linalg_lu", "linalg_lu_factor_ex", "_linalg_det", "_linalg_slogdet"):
        yield aten(name, matrix)
    yield aten("linalg_ldl_factor_ex", symmetric)
    yield aten("lu_unpack", *torch.linalg.lu_factor(matrix))
    yield aten("linalg_cholesky_ex", symmetric)
    yield aten("linalg_inv_ex", symmetric)
    codes = torch.zeros(symmetric.shape[:-2], dtype=torch.int32)
    yield torch_call("weft.checked", symmetric, codes, "linalg.inv", False)
    for driver in ("gels", "gelsy"):
        yield torch_call("weft.lstsq", f(5, 4, 3), f(5, 4, 2), None, driver)
        yield torch_call("weft.lstsq", f(5, 2, 3), f(5, 2), None, driver)
    yield torch_call("weft.lstsq", f(5, 2, 3), f(5, 2, 2), 1e-3, "gelsd")
    yield aten("linalg_matrix_exp", matrix)
    yield aten("cholesky_inverse", lower)
    yield aten("cholesky_solve", right, lower)
    yield aten("linalg_householder_product", f(5, 4, 3), f(5, 3))
    yield aten("linalg_solve_triangular", matrix, right, upper=True)
    yield aten("linalg_solve_triangular", f(3, 3), right, upper=False)
    yield aten("linalg_solve_triangular", matrix, f(5, 4, 3), upper=True, left=False)
    yield aten("_linalg_solve_ex", symmetric, right)
    yield aten("_linalg_solve_ex", symmetric, f(5, 3))
    yield aten("_linalg_solve_ex", symmetric, f(3, 4))
    yield aten("_linalg_solve_ex", f(4, 4), f(4))


def special_functions() -> Iterator[TorchCall]:
    for name in SPECIAL.split():
        if name == "polygamma":
            yield aten(name, 1, f(5, 4))
        else:
            yield aten(name, f(5, 4).abs() + 0.1)
    for name in SPECIAL_BINARY.split():
        if name in ("gcd", "lcm"):
            yield aten(name, i(9, 5, 4) + 1, i(9, 4) + 1)
        elif name == "nextafter":
            yield aten(name, f(5, 4), f(4))
        else:
            yield aten(name, f(5, 4), i(4, 4).to(torch.float64) + 2)
    yield aten("igamma", f(5, 4).abs(), f(4).abs())
    yield aten("igammac", f(5, 4).abs(), f(4).abs())


def orders_and_reductions() -> Iterator[TorchCall]:
    yield aten("sort.stable", f(5, 6), stable=True, dim=1)
    yield aten("sort.stable", f(5, 6), stable=True)
    yield aten("median", f(5, 4))
    yield aten("nanmedian", torch.where(b(5, 4), f(5, 4), torch.nan))
    yield aten("nanmedian.dim", f(5, 4), 0)
    for reduce in ("sum", "amax"):
        yield aten("scatter_reduce.two", f(5, 6), 1, i(6, 5, 6), f(5, 6), reduce)
        yield aten(
            "scatter_reduce.two", f(5, 6), 1, i(6, 5, 6), f(5, 6), reduce, include_self=False
        )
        yield aten("index_reduce", f(6, 4), 0, i(6, 5), f(5, 4), reduce.replace("sum", "prod"))


FAMILIES = [linear_algebra, special_functions, orders_and_reductions]
