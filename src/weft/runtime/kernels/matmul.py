"""Large products of float32 matrices on the CPU: oneDNN's kernel where ATen's would call BLAS.

With AVX-512, `mkldnn._linear_pointwise` (what Inductor calls for linear layers) takes 4 to 47 % less
time than BLAS (MKL on an EPYC) from some 256³ on, most with a large second operand; below, its 15
µs a call decide. Which one runs depends on shapes and on the CPU alone, so equal ranks sum in the
same order.

Products of matrices that are summed over micro-batches, added to the sum as they are computed.

The gradient of a weight is `mm` and then `weft.accumulate`. Joined, BLAS adds to the sum itself: the
product is neither written nor read, and takes no memory of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from weft.ir.logical import refs
from weft.ir.plan import LocalCall

# From so many multiplications on, which are known when it runs; fewer elements of the result are
# never worth the look.
_LARGE, _WIDE = 2**24, 2**14
_OPS = {"aten.mm.default": "weft.large_mm", "aten.addmm.default": "weft.large_addmm"}


def matmul_op(call: LocalCall, device: torch.device) -> str:
    """The op that a kernel calls for `call`: itself, but for products of matrices that may be large."""
    if call.op not in _OPS or call.kwargs or device.type != "cpu" or not onednn_is_faster():
        return call.op
    made = call.outputs[0]
    if made is None or made.dtype != "float32" or math.prod(made.shape) < _WIDE:
        return call.op
    return _OPS[call.op]


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


SUMMED_PRODUCT = "weft.accumulate_mm"
# BLAS adds to sums of these; integers have other kernels, and of the short floats it would add rounded sums.
_FLOATS = frozenset(("float32", "float64"))


def join_sums(nodes: Sequence[LocalCall], outputs: Collection[str]) -> tuple[LocalCall, ...]:
    """The calls with each sum of a product that nothing else reads as one call, in the sum's place.

    Args:
        nodes: of a segment, in order.
        outputs: names of the values that it returns.
    """
    uses = Counter(name for node in nodes for name in node.reads)
    products = {
        node.makes[0].name: node
        for node in nodes
        if node.op == "aten.mm.default" and node.makes[0].dtype in _FLOATS
    }
    sums = {
        name: node
        for node in nodes
        if (name := _summed(node)) in products and uses[name] == 1 and name not in outputs
    }
    gone = {id(products[name]) for name in sums}
    joined = {
        id(node): replace(node, op=SUMMED_PRODUCT, args=products[name].args)
        for name, node in sums.items()
    }
    return tuple(joined.get(id(node), node) for node in nodes if id(node) not in gone)


def _summed(node: LocalCall) -> str:
    """The name of the value that a call sums up; "" for all other calls."""
    if node.op != "weft.accumulate" or node.args[1] != "sum":
        return ""
    (name,) = refs(node.args[0])
    return name


class SumOfProducts:
    """`weft.accumulate_mm(a, b)`: the sum of `a @ b` over the micro-batches.

    Args:
        micro_batches: how many a step has.
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
