"""The layout of a tensor's gradient, given the layout of the tensor."""

from __future__ import annotations

from weft.errors import LayoutError
from weft.layout import SBP, Broadcast, Layout, Partial


def gradient_layout(layout: Layout) -> Layout:
    """The layout in which a gradient is complete without communication: S→S, B→P(sum), P(sum)→B.

    Every rank differentiates with respect to its own local tensor. Each rank uses its own copy of
    what is Broadcast, so that the gradients add up; each part of a sum has the gradient of the sum.
    The function is its own inverse.

    Raises:
        LayoutError: for a Partial of another reduction, which is not linear; box it to Broadcast
            before.
    """
    return Layout(layout.placement, tuple(_gradient(sbp, layout) for sbp in layout.sbp))


def _gradient(sbp: SBP, layout: Layout) -> SBP:
    match sbp:
        case Broadcast():
            return Partial("sum")
        case Partial("sum"):
            return Broadcast()
        case Partial(reduction):
            raise LayoutError(
                f"no gradient passes P({reduction}), which is not linear, in {layout}; "
                "box the tensor to B or to a split first"
            )
    return sbp
