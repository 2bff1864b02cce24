"""The signature that an eager op runs with: the cheapest in boxing and work, given how its operands lie.

The compiled path weighs a whole graph; here one op is seen at a time. So that a result lies as its
operands do, an axis along which they already fit a signature keeps it. A split that leaves ranks
empty is chosen only where an operand lies so already.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from heapq import nsmallest
from typing import final

from weft.boxing import EXCHANGES, axis_bytes, steps
from weft.compiler.layouts.options import all_have_elements
from weft.compiler.signatures import halo_cost
from weft.hardware import CostModel
from weft.layout import Broadcast, Layout, Placement
from weft.ops import OpCall, Signature, TensorSpec, flops, item, localize, signatures, traffic
from weft.ops.cost import tensor_bytes
from weft.ops.signatures import BLANK
from weft.ops.windows import signatures_with_windows, slides_at
from weft.units import ITEM_SIZE, Bytes, Flops

PerAxis = tuple[Signature, ...]

_COST = CostModel()

# Beyond two axes only so many signatures of an axis are looked at, those that are cheapest to box
# into.
_CANDIDATES = 6


def choose(
    call: OpCall, layouts: Sequence[Layout], placement: Placement, fixed: Collection[int] = ()
) -> PerAxis:
    """One signature for each axis of `placement`.

    Args:
        fixed: operands that stay Broadcast.

    Raises:
        RuleError: when the op has no rule.
    """
    found: dict[PerAxis, float] = {}
    for keep in (True, False):
        search = _SignatureSearch(call, tuple(layouts), placement, tuple(fixed), keep)
        for chosen, local in search.candidates(call, call, ()):
            found.setdefault(chosen, search.cost(chosen, local))
        if found:
            return min(found, key=lambda chosen: found[chosen])
    return tuple(signatures(call, parts)[0] for parts in placement.shape)


def operand_layout(chosen: PerAxis, operand: int, placement: Placement) -> Layout:
    """The layout that an operand must have."""
    return Layout(placement, tuple(signature.operands[operand] for signature in chosen))


@final
class _SignatureSearch:
    """All signatures of the grid's axes, outermost first. `keep`: an axis that fits stays as it is."""

    def __init__(
        self,
        call: OpCall,
        layouts: tuple[Layout, ...],
        placement: Placement,
        fixed: tuple[int, ...],
        keep: bool,
    ) -> None:
        self.call = call
        self.layouts = layouts
        self.placement = placement
        self.fixed = fixed
        self.keep = keep
        # True where operands leave ranks empty, so that others may too.
        self.empty = not _all_hold_some(call, layouts, placement)

    def candidates(
        self, call: OpCall, least: OpCall, chosen: PerAxis
    ) -> Iterator[tuple[PerAxis, OpCall]]:
        """Every combination, with the call of the rank with the largest shards; `least` is that with the smallest."""
        axis = len(chosen)
        grid = self.placement.shape
        if axis == len(grid):
            if self.empty or all_have_elements(self.call, chosen, grid):
                yield chosen, call
            return
        for signature in self._of_axis(call, axis):
            if self.empty and not self._fits(least, signature, axis):
                continue
            local = localize(call, signature, grid[axis], 0)
            last = localize(least, signature, grid[axis], grid[axis] - 1) if self.empty else local
            yield from self.candidates(local, last, (*chosen, signature))

    def _fits(self, least: OpCall, signature: Signature, axis: int) -> bool:
        """True where a rank with the smallest shards can run the signature too, as kernels ask that take none empty."""
        parts = self.placement.shape[axis]
        return least.op == BLANK or signature in signatures_with_windows(least, parts, self.empty)

    def cost(self, chosen: PerAxis, local: OpCall) -> float:
        """Boxing of all operands and work of all ranks, in bytes."""
        ranks = len(self.placement.ranks)
        touched = Bytes(ranks * traffic(local))
        total = _COST.work(Flops(ranks * flops(local)), touched, item(local))
        for operand, (spec, layout) in enumerate(
            zip(self.call.operands, self.layouts, strict=True)
        ):
            total += _boxing(spec, layout, operand_layout(chosen, operand, self.placement))
        return total + self._halos(chosen)

    def _halos(self, chosen: PerAxis) -> float:
        if not slides_at(self.call.op):
            return 0.0
        call, grid, total = self.call, self.placement.shape, 0.0
        for axis, signature in enumerate(chosen):
            total += halo_cost(call, signature, grid, axis, _COST)
            call = localize(call, signature, grid[axis], 0)
        return total

    def _of_axis(self, call: OpCall, axis: int) -> Sequence[Signature]:
        every = [
            signature
            for signature in signatures_with_windows(call, self.placement.shape[axis], self.empty)
            if all(signature.operands[index] == Broadcast() for index in self.fixed)
        ]
        here = tuple(layout.sbp[axis] for layout in self.layouts)
        fit = [signature for signature in every if signature.operands == here]
        if fit and self.keep:
            return fit
        if self.placement.axes > 2:
            return nsmallest(_CANDIDATES, every, key=lambda one: self._axis_cost(one, axis))
        return every

    def _axis_cost(self, signature: Signature, axis: int) -> int:
        parts = self.placement.shape[axis]
        return sum(
            axis_bytes(layout.sbp[axis], wanted, parts, tensor_bytes(spec))
            for spec, layout, wanted in zip(
                self.call.operands, self.layouts, signature.operands, strict=True
            )
        )


def _all_hold_some(call: OpCall, layouts: Sequence[Layout], placement: Placement) -> bool:
    by_axis = zip(*(layout.sbp for layout in layouts), strict=True)
    given = tuple(Signature(operands, ()) for operands in by_axis)
    return all_have_elements(replace(call, results=()), given, placement.shape)


def _boxing(spec: TensorSpec, source: Layout, target: Layout) -> float:
    if source == target:
        return 0.0
    chain = steps(source, target, spec.shape, ITEM_SIZE.get(spec.dtype, 8))
    collectives = sum(step.kind in EXCHANGES for step in chain)
    return _COST.boxing(Bytes(sum(step.bytes for step in chain)), collectives)
