"""Ops that make one value of all micro-batches of a step (`OVER_STEP`) and keep it between acts."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from weft.runtime.channel import COMBINE, SIGNED, reduce_in_order
from weft.runtime.summed_products import SUMMED_PRODUCT, SumOfProducts


class Accumulate:
    """`weft.accumulate(x, reduction)`: the reduction of `x` over the micro-batches, in place.

    Args:
        micro_batches: how many a step has.
        owned: whether nobody else reads or keeps the memory of `x`, so that the first one may take
            the others in.
    """

    def __init__(self, micro_batches: int, owned: bool) -> None:
        self._last = micro_batches - 1
        self._owned = owned
        # The reduction so far; None between steps.
        self._total: Tensor | None = None

    def __call__(self, micro: int, x: Tensor, /, reduction: str) -> Tensor:
        total = self._total
        if total is None:
            total = x if self._owned else x.clone()
        elif x.dtype in SIGNED:
            total = reduce_in_order((total, x), reduction)
        else:
            COMBINE[reduction](total, x, out=total)
        self._total = None if micro == self._last else total
        return total


class Pack:
    """`weft.pack(x, dim)`: the values of the micro-batches, all of one size, joined along `dim`."""

    def __init__(self, micro_batches: int, owned: bool = False) -> None:
        self._micro_batches = micro_batches
        # What is packed so far; None between steps.
        self._whole: Tensor | None = None

    def __call__(self, micro: int, x: Tensor, /, dim: int) -> Tensor:
        size = x.shape[dim]
        whole = self._whole
        if whole is None:
            shape = list(x.shape)
            shape[dim] *= self._micro_batches
            whole = x.new_empty(shape)
        whole.narrow(dim, micro * size, size).copy_(x)
        self._whole = None if micro + 1 == self._micro_batches else whole
        return whole


# Of (micro-batches, owned): something that takes the values of one step's micro-batches in order, as
# `(micro, x, argument)`; what it returns after the last one is the result.
OVER_STEP_OPS: dict[str, Callable[[int, bool], Callable[..., Tensor]]] = {
    "weft.accumulate": Accumulate,
    "weft.pack": Pack,
    SUMMED_PRODUCT: SumOfProducts,
}
