"""Products of matrices that are summed over micro-batches, added to the sum as they are computed.

`weft.compiler.specialize` joins them: BLAS adds to the sum itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

SUMMED_PRODUCT = "weft.accumulate_mm"


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
