"""The cheapest chain of steps between two layouts of one placement: shortest path over layouts."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import TypeAlias

from weft.boxing.step import COLLECTIVES, Step, StepKind, step_bytes, step_kind
from weft.errors import InternalError, LayoutError
from weft.layout import SBP, Broadcast, Layout, Partial, Split
from weft.units import Bytes

# What one more collective weighs, in bytes: a small stand-in for its latency, so that small tensors, and chains that
# move the same bytes, take fewer collectives.
COLLECTIVE_BYTES = Bytes(1024)

State: TypeAlias = tuple[SBP, ...]
Move: TypeAlias = tuple[StepKind, int, State, Bytes]


@lru_cache(maxsize=65536)
def steps(
    source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int
) -> tuple[Step, ...]:
    """The cheapest chain of steps that takes a tensor from `source` to `target`.

    Cheapest in bytes moved over all ranks plus `COLLECTIVE_BYTES` for each collective; among equals the chain with
    fewer steps. The same arguments give the same chain on every rank.

    Args:
        source, target: layouts on the same placement.
        shape: whole shape of the tensor; dimensions may have fewer elements than there are ranks.
        itemsize: bytes of one element.

    Raises:
        LayoutError: when the placements differ, or a layout does not fit the shape.
    """
    if source.placement != target.placement:
        raise LayoutError(
            f"boxing between two placements is not supported yet: from {source} to {target}"
        )
    source.check(shape)
    target.check(shape)
    grid = source.placement.shape
    options = sbp_options(grid, shape, source.sbp + target.sbp)
    chain = _shortest(source.sbp, target.sbp, grid, shape, itemsize, options)
    found, here = [], source
    for kind, axis, state, moved in chain:
        there = Layout(source.placement, state)
        found.append(Step(kind, axis, here, there, moved))
        here = there
    return tuple(found)


def sbp_options(grid: tuple[int, ...], shape: tuple[int, ...], ends: State) -> State:
    """The SBPs that a chain may pass through on any axis, in a fixed order.

    Those of both `ends`, Broadcast, Partial(sum), and splits of the dimensions that divide evenly however they are
    cut: collectives on uneven pieces in between are never worth their padding.
    """
    even = (Split(dim) for dim, size in enumerate(shape) if size and size % math.prod(grid) == 0)
    found = {Broadcast(), Partial("sum"), *even, *ends}
    return tuple(sorted(found, key=_order))


def moves(
    state: State, grid: tuple[int, ...], shape: tuple[int, ...], itemsize: int, options: State
) -> Iterator[Move]:
    """All single steps from `state`: kind, axis, state afterwards, bytes over all ranks."""
    for axis, here in enumerate(state):
        if not _innermost(state, axis, here, grid):
            continue
        held = _bytes_of_groups(state, axis, grid, shape, itemsize)
        for there in options:
            kind = None if there == here else step_kind(here, there, grid[axis])
            if kind is not None and _innermost(state, axis, there, grid):
                after = state[:axis] + (there,) + state[axis + 1 :]
                yield kind, axis, after, step_bytes(kind, grid[axis], held)


def move_weight(kind: StepKind, moved: int) -> int:
    """What a step weighs against others, in bytes."""
    return moved + COLLECTIVE_BYTES * (kind in COLLECTIVES)


def _shortest(
    source: State,
    target: State,
    grid: tuple[int, ...],
    shape: tuple[int, ...],
    itemsize: int,
    options: State,
) -> list[Move]:
    """Dijkstra's algorithm; ties go to fewer steps, then to the earlier state in the order of `options`."""
    rank = {sbp: number for number, sbp in enumerate(options)}
    reached: dict[State, tuple[State, Move] | None] = {}
    queue: list[tuple[int, int, tuple[int, ...], State, tuple[State, Move] | None]]
    queue = [(0, 0, (), source, None)]
    while queue:
        weight, hops, _, state, last = heapq.heappop(queue)
        if state in reached:
            continue
        reached[state] = last
        if state == target:
            return _unwind(reached, target)
        for move in moves(state, grid, shape, itemsize, options):
            kind, axis, after, moved = move
            if after not in reached:
                # The previous state's order and the axis make the key unique: the heap never compares states.
                key = (*(rank[sbp] for sbp in after), *(rank[sbp] for sbp in state), axis)
                heavier = weight + move_weight(kind, moved)
                heapq.heappush(queue, (heavier, hops + 1, key, after, (state, move)))
    raise InternalError(f"no chain of steps leads from {source} to {target} on a grid of {grid}")


def _unwind(reached: dict[State, tuple[State, Move] | None], state: State) -> list[Move]:
    chain: list[Move] = []
    while (last := reached[state]) is not None:
        state, move = last
        chain.append(move)
    return chain[::-1]


def _innermost(state: State, axis: int, sbp: SBP, grid: tuple[int, ...]) -> bool:
    """Whether `axis` may leave or enter `sbp`: nothing that nests in it may stand on a later axis.

    A later axis that splits the same dimension cuts this axis's pieces. A later Partial with another reduction is
    reduced before this axis's Partial, and a sum of maxima is not a maximum of sums.
    """
    later = zip(state[axis + 1 :], grid[axis + 1 :], strict=True)
    return not any(parts > 1 and _nests(sbp, inner) for inner, parts in later)


def _nests(outer: SBP, inner: SBP) -> bool:
    if isinstance(outer, Split):
        return outer == inner
    return isinstance(outer, Partial) and isinstance(inner, Partial) and outer != inner


def _bytes_of_groups(
    state: State, axis: int, grid: tuple[int, ...], shape: tuple[int, ...], itemsize: int
) -> int:
    """Bytes of one group's tensor, summed over all groups along `axis`.

    Axes that split share one tensor between their groups, even when unevenly; the others repeat it.
    """
    copies = math.prod(
        parts
        for other, (sbp, parts) in enumerate(zip(state, grid, strict=True))
        if other != axis and not isinstance(sbp, Split)
    )
    return math.prod(shape) * itemsize * copies


def _order(sbp: SBP) -> tuple[int, int, str]:
    match sbp:
        case Broadcast():
            return (0, 0, "")
        case Split(dim):
            return (1, dim, "")
        case Partial(reduction):
            return (2, 0, "" if reduction == "sum" else reduction)
