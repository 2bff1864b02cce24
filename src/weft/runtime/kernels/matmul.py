"""Large products of float32 matrices on the CPU: oneDNN's kernel where ATen's would call BLAS.

With AVX-512, `mkldnn._linear_pointwise` (what Inductor calls for linear layers) takes 4 to 47 % less
time than BLAS (MKL on an EPYC) from some 256³ on, most with a large second operand; below, its 15
µs a call decide. Which one runs depends on shapes and on the CPU alone (`weft.compiler.plans.specialize`), so
equal ranks sum in the same order.

Products that are summed over micro-batches are added to the sum as they are computed, by BLAS
itself (`weft.compiler.plans.specialize` joins them).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, final

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
    """True where oneDNN is faster: not with a transposed first operand, as gradients of weights have."""
    return a.stride(1) == 1 and a.shape[0] * b.numel() >= _LARGE


@cache
def onednn_is_faster() -> bool:
    """True where this CPU and this torch have the kernel."""
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


SUMMED_PRODUCT = "weft.accumulate_mm"


@final
class SumOfProducts:
    """`weft.accumulate_mm(a, b)`: the sum of `a @ b` over the micro-batches.

    Args:
        micro_batches: their number in a step.
        owned: as of every op over a step; the sum is always this one's own.
    """

    def __init__(self, micro_batches: int, owned: bool = True) -> None:
        self._last = micro_batches - 1
        # The sum so far; None between steps.
        self._total: Tensor | None = None

    def __call__(self, micro: int, a: Tensor, b: Tensor, /) -> Tensor:
        total = self._total
        total = torch.mm(a, b) if total is None else total.addmm_(a, b)
        self._total = None if micro == self._last else total
        return total
