"""Products of matrices that are summed over micro-batches, added to the sum as they are computed.

The gradient of a weight is `mm` and then `weft.accumulate`. Joined, BLAS adds to the sum itself: the
product is neither written nor read, and takes no memory of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weft.ir.logical import refs
from weft.ir.plan import LocalCall

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
