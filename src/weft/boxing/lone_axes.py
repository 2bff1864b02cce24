"""Axes of one rank in chains of steps: every SBP means the same along them, so that they change first and at no cost.

A chain is looked for among the layouts of the other axes: each axis of one rank would multiply their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, final

from weft.boxing.transfer import BoxingStep
from weft.layout import Broadcast, Layout, Partial, Placement
from weft.units import Bytes

Search: TypeAlias = Callable[[Layout, Layout], tuple[BoxingStep, ...]]


@final
@dataclass(frozen=True)
class _Kept:
    """The axes of a placement that a search looks at: those of several ranks, or the first where there are none."""

    placement: Placement
    axes: tuple[int, ...]

    @staticmethod
    def of(placement: Placement) -> _Kept:
        several = tuple([axis for axis, parts in enumerate(placement.shape) if parts > 1])
        return _Kept(placement, several or (0,))

    @property
    def lone(self) -> tuple[int, ...]:
        """The other axes."""
        return tuple([axis for axis in range(self.placement.axes) if axis not in self.axes])

    def small(self, layout: Layout) -> Layout:
        """A layout along the axes that are kept."""
        place = self.placement
        shape = tuple([place.shape[axis] for axis in self.axes])
        sbp = tuple([layout.sbp[axis] for axis in self.axes])
        return Layout(Placement(place.device_type, shape, place.ranks), sbp)

    def whole(self, small: Layout, beside: Layout) -> Layout:
        """A layout along all axes: those that are not kept as `beside` has them."""
        along = dict(zip(self.axes, small.sbp, strict=True))
        sbps = tuple([along.get(axis, sbp) for axis, sbp in enumerate(beside.sbp)])
        return Layout(self.placement, sbps)


def without_lone_axes(source: Layout, target: Layout, search: Search) -> tuple[BoxingStep, ...]:
    """The chain of steps between two layouts; `search` finds it on placements without axes of one rank."""
    here, there = _Kept.of(source.placement), _Kept.of(target.placement)
    start, end = here.small(source), there.small(target)
    apart = source.placement != target.placement
    if not (here.lone or there.lone) or (apart and start.placement == end.placement):
        return search(source, target)
    # Along these axes: what the steps before and after a transfer have, which is of no Partial.
    left = _whole(source, here) if apart else target
    reached = _whole(target, there) if apart else target
    ends = {start.placement: (here, left), end.placement: (there, reached)}

    def along_all(small: Layout) -> Layout:
        kept, beside = ends[small.placement]
        return kept.whole(small, beside)

    found = list(_changes(source, left, here.lone))
    for step in search(start, end):
        axis = -1 if step.kind == "transfer" else ends[step.source.placement][0].axes[step.axis]
        found.append(
            replace(step, axis=axis, source=along_all(step.source), target=along_all(step.target))
        )
    return (*found, *_changes(along_all(end), target, there.lone))


def _whole(layout: Layout, kept: _Kept) -> Layout:
    """The layout, with Broadcast in place of Partials along axes of one rank."""
    pairs = enumerate(layout.sbp)
    sbps = [
        Broadcast() if axis in kept.lone and isinstance(sbp, Partial) else sbp
        for axis, sbp in pairs
    ]
    return Layout(layout.placement, tuple(sbps))


def _changes(source: Layout, target: Layout, axes: Sequence[int]) -> Iterator[BoxingStep]:
    """Steps from one layout to what another has along some axes of one rank."""
    here = source
    for axis in axes:
        if here.sbp[axis] != target.sbp[axis]:
            sbp = (*here.sbp[:axis], target.sbp[axis], *here.sbp[axis + 1 :])
            there = Layout(here.placement, sbp)
            yield BoxingStep("reinterpret", axis, here, there, Bytes(0))
            here = there
