"""Large products of float32 matrices on the CPU: oneDNN's kernel where ATen's would call BLAS.

With AVX-512, `mkldnn._linear_pointwise` (what Inductor calls for linear layers) takes 4 to 47 % less
time than BLAS (MKL on an EPYC) from some 256³ on, most with a large second operand; below, its 15
µs a call decide. Which one runs depends on shapes and on the CPU alone (`weft.compiler.specialize`), so
equal ranks sum in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

# From so many multiplications on, which are known when it runs.
_LARGE = 2**24


def large_mm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`; shapes [m, k] and [k, n], float32."""
    if _fits(a, b):
        product: Tensor = _linear()(a, b.t(), None, "none", [], "")
        return product
    return torch.mm(a, b)


def large_addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`bias + a @ b`; shapes [n], [m, k] and [k, n], float32."""
    if _fits(a, b) and bias.dim() == 1 and bias.shape[0] == b.shape[1] and bias.stride(0) == 1:
        product: Tensor = _linear()(a, b.t(), bias, "none", [], "")
        return product
    return torch.addmm(bias, a, b)


def _fits(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN is faster: not with a transposed first operand, as gradients of weights have."""
    return a.stride(1) == 1 and a.shape[0] * b.numel() >= _LARGE


@cache
def onednn_is_faster() -> bool:
    """Whether this CPU and this torch have the kernel."""
    known = hasattr(torch.ops.mkldnn, "_linear_pointwise")  # not where torch lacks oneDNN
    return known and torch.backends.cpu.get_cpu_capability() == "AVX512"


@cache
def _linear() -> Callable[..., Any]:
    linear: Callable[..., Any] = torch.ops.mkldnn._linear_pointwise.default
    return linear


MATMUL_OPS: dict[str, Callable[..., Any]] = {
    "weft.large_mm": large_mm,
    "weft.large_addmm": large_addmm,
}
