"""The cheapest chain of steps between two layouts: shortest path over the layouts of both placements."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from weft.boxing.overlaps import Indices, State, overlaps
from weft.boxing.routes import numbered_layouts
from weft.boxing.transfer import (
    EXCHANGES,
    BoxingStep,
    Crossings,
    StepKind,
    missing_elements,
    step_bytes,
    step_kind,
)
from weft.cached import cached_property
from weft.errors import InternalError, LayoutError
from weft.layout import SBP, Broadcast, Layout, Partial, Placement, Split
from weft.units import Bytes

# The weight of one more exchange, in bytes: a small stand-in for its latency, so that small
# tensors, and chains that move the same bytes, take fewer exchanges.
EXCHANGE_BYTES = Bytes(1024)

Move: TypeAlias = tuple[StepKind, int, State, Bytes]


@lru_cache(maxsize=65536)
def steps(
    source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int
) -> tuple[BoxingStep, ...]:
    """The cheapest chain of steps that takes a tensor from `source` to `target`.

    Between two placements (the same ranks on another grid, or other ranks) it is steps on the
    source's grid, one transfer, and steps on the target's. On one placement too a transfer may
    change several axes at once.

    Cheapest in bytes moved over all ranks plus `EXCHANGE_BYTES` for each exchange; among equals
    the chain with fewer steps. The same arguments give the same chain on every rank.

    Boxing is the identity of the whole tensor, so the gradient passes it unchanged: it arrives in
    `gradient_layout(target)` and leaves, boxed if need be, in `gradient_layout(source)`. For
    P(sum)→B, for example, B arrives, and B is what the source needs.

    Args:
        source, target: layouts; on CPUs both, or on CUDA devices both.
        shape: whole shape of the tensor; dimensions may have fewer elements than there are ranks.
        itemsize: bytes of one element.

    Raises:
        LayoutError: when the device types differ, or a layout does not fit the shape.
    """
    if source.placement.device_type != target.placement.device_type:
        raise LayoutError(
            f"boxing needs ranks of one device type, got {source} and {target}; "
            "copy the tensor to the other device first"
        )
    source.check(shape)
    target.check(shape)
    here, there = numbered_layouts(source, target)
    placements = {here.placement: source.placement, there.placement: target.placement}
    return tuple(
        [
            replace(step, source=_on(placements, step.source), target=_on(placements, step.target))
            for step in _numbered_steps(here, there, shape, itemsize)
        ]
    )


@lru_cache(maxsize=65536)
def _numbered_steps(
    source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int
) -> tuple[BoxingStep, ...]:
    """The chain between placements whose ranks are numbered again: pairs of placements that are alike share it."""

    def search(here: Layout, there: Layout) -> tuple[BoxingStep, ...]:
        return _PathSearch(here, there, shape, itemsize).shortest()

    return without_lone_axes(source, target, search)


def _on(placements: Mapping[Placement, Placement], layout: Layout) -> Layout:
    return Layout(placements[layout.placement], layout.sbp)


def moves(
    state: State, grid: tuple[int, ...], shape: tuple[int, ...], itemsize: int, options: State
) -> Iterator[Move]:
    """All single steps from `state` on one grid: kind, axis, state afterwards, bytes over all ranks."""
    for kind, axis, after in changes(state, grid, options):
        ranks, ends = math.prod(grid), (state[axis], after[axis])
        if kind not in EXCHANGES:
            moved = Bytes(0)
        elif kind == "all_to_all" and any(
            isinstance(sbp, Split) and shape[sbp.dim] % ranks for sbp in ends
        ):
            moved = Bytes(missing_elements(state, after, grid, shape) * itemsize)
        else:
            held = math.prod(shape) * itemsize * copies(state, grid, axis)
            moved = step_bytes(kind, grid[axis], Bytes(held))
        yield kind, axis, after, moved


def changes(
    state: State, grid: tuple[int, ...], options: State
) -> Iterator[tuple[StepKind, int, State]]:
    """All single steps from `state` on one grid: kind, axis, state afterwards."""
    for axis, here in enumerate(state):
        if not _innermost(state, axis, here, grid):
            continue
        for there in options:
            kind = None if there == here else step_kind(here, there, grid[axis])
            if kind is not None and _innermost(state, axis, there, grid):
                yield kind, axis, state[:axis] + (there,) + state[axis + 1 :]


def move_weight(kind: StepKind, moved: int) -> int:
    """The weight of a step against others, in bytes."""
    return moved + EXCHANGE_BYTES * (kind in EXCHANGES)


@final
@dataclass(frozen=True)
class _PathSearch:
    """Dijkstra's algorithm over layouts; ties go to fewer steps, to even shards, to Broadcast and earlier splits.

    Bytes are sums over all ranks, to which it is the same whether one rank holds a tensor or all have a part of it.
    """

    source: Layout
    target: Layout
    shape: tuple[int, ...]
    itemsize: int

    def shortest(self) -> tuple[BoxingStep, ...]:
        order = {sbp: number for number, sbp in enumerate(self._options)}
        reached: dict[Layout, BoxingStep | None] = {}
        # The count makes the key unique: the heap never compares steps.
        queue: list[tuple[int, int, tuple[int, ...], int, BoxingStep | None]] = [
            (0, 0, (), 0, None)
        ]
        count = 1
        # The least weight of a chain that is known to reach the target; and the least that leads to each layout: what
        # is no less comes later in the queue.
        limit, least = math.inf, dict[Layout, tuple[int, int]]()
        while queue:
            weight, hops, _, _, last = heapq.heappop(queue)
            here = self.source if last is None else last.target
            if here in reached:
                continue
            reached[here] = last
            if here == self.target:
                chain: list[BoxingStep] = []
                while last is not None:
                    chain.append(last)
                    last = reached[last.source]
                return tuple(chain[::-1])
            for step in self._steps_from(here, limit - weight):
                heavier = weight + move_weight(step.kind, step.bytes)
                limit = min(limit, heavier) if step.target == self.target else limit
                # A collective comes before a transfer that moves as much: it can be joined with
                # others.
                further = hops + 1 + (step.kind == "transfer")
                if least.get(step.target, (math.inf, 0)) <= (heavier, further):
                    continue
                least[step.target] = heavier, further
                # Elements that all shards would hold beyond the tensor, were all as large as the first, the largest.
                there = step.target
                largest = there.local_shape(self.shape, there.placement.ranks[0])
                pairs = zip(there.sbp, there.placement.shape, strict=True)
                pieces = math.prod(parts for sbp, parts in pairs if isinstance(sbp, Split))
                unevenness = math.prod(largest) * pieces - math.prod(self.shape)
                key = (unevenness, *(order[sbp] for sbp in there.sbp))
                heapq.heappush(queue, (heavier, further, key, count, step))
                count += 1
        raise InternalError(f"no chain of steps leads from {self.source} to {self.target}")

    @cached_property
    def _crossings(self) -> Crossings:
        whole = [sbp for sbp in self._options if not isinstance(sbp, Partial)]
        placement = self.target.placement
        return Crossings(placement, tuple(product(whole, repeat=placement.axes)), self.shape)

    @cached_property
    def _options(self) -> State:
        """The SBPs that a chain may pass on any axis: of both ends, Broadcast, Partial(sum), splits."""
        splits = map(Split, range(len(self.shape)))
        found = {Broadcast(), Partial("sum"), *splits, *self.source.sbp, *self.target.sbp}
        return tuple(sorted(found, key=_order))

    def _steps_from(self, here: Layout, room: float) -> Iterator[BoxingStep]:
        """The steps that may follow, of those that weigh at most `room`."""
        placement = here.placement
        options = self._options
        for kind, axis, after, moved in moves(
            here.sbp, placement.shape, self.shape, self.itemsize, options
        ):
            if move_weight(kind, moved) <= room:
                yield BoxingStep(kind, axis, here, Layout(placement, after), moved)
        if any(isinstance(sbp, Partial) for sbp in here.sbp):
            return
        # Transfers to every layout without a Partial on the target's placement.
        crossings = self._crossings
        for state, elements in zip(crossings.states, crossings.elements(here), strict=True):
            moved, there = Bytes(elements * self.itemsize), Layout(self.target.placement, state)
            if move_weight("transfer", moved) <= room and there != here:
                yield BoxingStep("transfer", -1, here, there, moved)


def _innermost(state: State, axis: int, sbp: SBP, grid: tuple[int, ...]) -> bool:
    """True if `axis` may leave or enter `sbp`: nothing that nests in it may be on a later axis.

    A later axis that splits the same dimension cuts this axis's pieces. A later Partial with
    another reduction is reduced before this axis's Partial, and a sum of maxima is not a maximum of
    sums.
    """
    pairs = zip(state[axis + 1 :], grid[axis + 1 :], strict=True)
    later = [inner for inner, parts in pairs if parts > 1]
    if isinstance(sbp, Split):
        return sbp not in later
    partials = (inner for inner in later if isinstance(inner, Partial))
    return not isinstance(sbp, Partial) or all(inner == sbp for inner in partials)


def copies(state: State, grid: tuple[int, ...], but: int | None = None) -> int:
    """The number of copies of a tensor on a grid; along all axes, or all but one, whose groups are counted so.

    Axes that split share one tensor, even when unevenly; the others repeat it.
    """
    pairs = enumerate(zip(state, grid, strict=True))
    return math.prod(
        parts for axis, (sbp, parts) in pairs if axis != but and not isinstance(sbp, Split)
    )


def _order(sbp: SBP) -> tuple[int, int, str]:
    match sbp:
        case Broadcast():
            return (0, 0, "")
        case Split(dim):
            return (1, dim, "")
        case Partial(reduction):
            return (2, 0, "" if reduction == "sum" else reduction)


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
        """Axes of one rank, which the search leaves out."""
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
    pairs = enumerate(layout.sbp)
    sbps = [
        Broadcast() if axis in kept.lone and isinstance(sbp, Partial) else sbp
        for axis, sbp in pairs
    ]
    return Layout(layout.placement, tuple(sbps))


def _changes(source: Layout, target: Layout, axes: Sequence[int]) -> Iterator[BoxingStep]:
    here = source
    for axis in axes:
        if here.sbp[axis] != target.sbp[axis]:
            sbp = (*here.sbp[:axis], target.sbp[axis], *here.sbp[axis + 1 :])
            there = Layout(here.placement, sbp)
            yield BoxingStep("reinterpret", axis, here, there, Bytes(0))
            here = there


@final
@dataclass(frozen=True, eq=False)
class GridMoves:
    """The steps that change the SBP of one axis, in the order of the states that they leave.

    Attributes:
        before, after: for each step, the numbers of two states.
        exchanges: for each step, true if ranks talk to each other.
        moved, parts: for each step, the bytes of the tensor that it moves over all ranks, as numerators and divisors.
        swaps: the numbers of the steps from one split to another, and the dimensions of these [steps, 2].
    """

    grid: tuple[int, ...]
    states: tuple[State, ...]
    before: Indices
    after: Indices
    exchanges: npt.NDArray[np.bool_]
    moved: Indices
    parts: Indices
    swaps: tuple[Indices, Indices]

    @cached_property
    def numbers(self) -> dict[State, int]:
        """The number of each state."""
        return {state: number for number, state in enumerate(self.states)}

    def bytes(self, shape: tuple[int, ...], itemsize: int) -> Indices:
        """Bytes that each step moves over all ranks, of a tensor of whole `shape`."""
        found: Indices = self.moved * (math.prod(shape) * itemsize) // self.parts
        steps, dims = self.swaps
        divides = np.array([size % math.prod(self.grid) == 0 for size in shape], dtype=bool)
        uneven = steps[~divides[dims].all(axis=1)] if len(steps) else steps
        if len(uneven):
            left = [self.states[number] for number in self.before[uneven]]
            reached = [self.states[number] for number in self.after[uneven]]
            found[uneven] = overlaps(self.grid, shape).missing(left, reached) * itemsize
        return found


@lru_cache(maxsize=64)
def grid_moves(grid: tuple[int, ...], options: State) -> GridMoves:
    """The steps between all layouts of a grid that are made of some SBPs; each axis has several ranks."""
    states = tuple(product(options, repeat=len(grid)))
    number = {state: place for place, state in enumerate(states)}
    every = [
        (kind, axis, state, after)
        for state in states
        for kind, axis, after in changes(state, grid, options)
    ]
    swaps, dims = list[int](), list[tuple[int, int]]()
    for place, (_, axis, state, after) in enumerate(every):
        one, other = state[axis], after[axis]
        if isinstance(one, Split) and isinstance(other, Split):  # an all-to-all
            swaps.append(place)
            dims.append((one.dim, other.dim))
    # An all-to-all moves a part of the tensor; the others a multiple.
    parts = [grid[axis] if kind == "all_to_all" else 1 for kind, axis, *_ in every]
    return GridMoves(
        grid,
        states,
        _array([number[state] for *_, state, _ in every]),
        _array([number[after] for *_, after in every]),
        np.array([kind in EXCHANGES for kind, *_ in every], dtype=bool),
        _array(
            [
                step_bytes(kind, grid[axis], Bytes(copies(state, grid, axis) * part))
                for (kind, axis, state, _), part in zip(every, parts, strict=True)
            ]
        ),
        _array(parts),
        (_array(swaps), _array(dims).reshape(-1, 2)),
    )


def _array(numbers: Sequence[object]) -> Indices:
    return np.array(numbers, dtype=np.int64)
