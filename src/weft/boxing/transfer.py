"""Transfers within a placement or between two: each rank sends only what others need, and receives only what it lacks.

`weft.boxing.routes` decides which rank sends which piece to which rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, final

import numpy as np

from weft.boxing.overlaps import Ends, Indices, State, overlaps, regions_of
from weft.boxing.routes import all_ranks, numbered_layouts, rank_numbers, routes
from weft.cached import cached_property
from weft.ir.plan_nodes import Piece
from weft.layout import IDEMPOTENT, SBP, Broadcast, Layout, Partial, Placement, Split
from weft.units import Bytes


@final
@dataclass(frozen=True, slots=True)
class LocalTransfer:
    """One rank's part in a transfer.

    Attributes:
        ranks: the ranks of both placements, those of the source first; `index` is this rank's place
            among them.
        input_shape, output_shape: local shapes before and after; None if the rank is in only one placement.
        sends: for each peer in turn, the region of the input that it gets; this rank itself is a
            peer too.
        receives: for each peer in turn, the region of the output that comes from it.
        bytes: sent between ranks in total.
    """

    ranks: tuple[int, ...]
    index: int
    input_shape: tuple[int, ...] | None
    output_shape: tuple[int, ...] | None
    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]
    bytes: Bytes


def transfer_ranks(step: BoxingStep) -> tuple[int, ...]:
    """The ranks that a transfer brings together, in the order of its communicator."""
    return all_ranks(step.source.placement, step.target.placement)


def local_transfer(step: BoxingStep, shape: tuple[int, ...], rank: int) -> LocalTransfer:
    """The work of `rank`, of one of the placements or both, in `step` on a tensor of whole `shape`."""
    before, after = step.source, step.target
    index = rank_numbers(before.placement, after.placement)[rank]
    found = routes(*numbered_layouts(before, after), shape)
    return LocalTransfer(
        transfer_ranks(step),
        index,
        before.local_shape(shape, rank) if rank in before.placement.coordinates else None,
        after.local_shape(shape, rank) if rank in after.placement.coordinates else None,
        found.sends(index),
        found.receives(index),
        step.bytes,
    )


@final
@dataclass(frozen=True, eq=False)
class Crossings:
    """Elements that cross between ranks in transfers to layouts of one placement."""

    placement: Placement
    states: tuple[State, ...]
    shape: tuple[int, ...]

    @cached_property
    def _ends(self) -> Ends:
        return overlaps(self.placement.shape, self.shape).ends(self.states)

    def elements(self, here: Layout) -> list[int]:
        """For each state, the elements that cross in a transfer from `here`, whose SBPs are Split or Broadcast."""
        found: list[int] = (self._ends.held - self._kept(here)).tolist()
        return found

    def _kept(self, here: Layout) -> Indices:
        """For each state, the elements that ranks hold already."""
        placement, shape = self.placement, self.shape
        if here.placement == placement:
            return self._ends.common(here.sbp)
        places = {rank: place for place, rank in enumerate(here.placement.ranks)}
        columns = [place for place, rank in enumerate(placement.ranks) if rank in places]
        rows = [places[placement.ranks[place]] for place in columns]
        if not rows:
            return np.zeros(len(self.states), dtype=np.int64)
        every = regions_of(self.states, placement.shape, shape)
        starts, ends = (each[:, columns] for each in every)
        own = regions_of((here.sbp,), here.placement.shape, shape)
        own_starts, own_ends = (each[:, rows] for each in own)
        first = np.maximum(starts, own_starts)
        lengths = np.maximum(np.minimum(ends, own_ends) - first, 0)
        found: Indices = lengths.prod(axis=-1).sum(axis=-1)
        return found


def missing_elements(
    before: State, after: State, grid: tuple[int, ...], shape: tuple[int, ...]
) -> int:
    """Elements that the ranks of a grid must receive, all together, to go from one state to another.

    The states have no Partial.
    """
    return int(overlaps(grid, shape).missing((before,), (after,))[0])


StepKind: TypeAlias = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "transfer",
    "slice",
    "pad",
    "keep_first",
    "reinterpret",
]
# Kinds in which ranks talk to each other; the others are local.
EXCHANGES: frozenset[StepKind] = frozenset(
    ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "transfer")
)


@final
@dataclass(frozen=True, slots=True)
class BoxingStep:
    """One step of boxing.

    A "transfer" goes from one placement to another; its `axis` is -1, and no SBP before or after it
    is Partial. Every other kind stays on one placement and changes the SBP of `axis` only.

    `bytes` are sent between ranks in total; 0 for a local step.
    """

    kind: StepKind
    axis: int
    source: Layout
    target: Layout
    bytes: Bytes


def step_kind(source: SBP, target: SBP, parts: int) -> StepKind | None:
    """The kind of step that takes one axis of `parts` ranks from `source` to `target`; None when no single step does.

    Along an axis of one rank every SBP means the same. Broadcast is Partial of an idempotent
    reduction as it stands; the others keep it on the first rank. Other ranks, and the elements around
    a piece, hold the reduction's neutral element.
    """
    if parts == 1:
        return "reinterpret"
    match source, target:
        case Split(), Split():
            return "all_to_all"
        case Split(), Broadcast():
            return "all_gather"
        case Split(), Partial():
            return "pad"
        case Broadcast(), Split():
            return "slice"
        case Broadcast(), Partial(reduction):
            return "reinterpret" if reduction in IDEMPOTENT else "keep_first"
        case Partial(), Broadcast():
            return "all_reduce"
        case Partial(), Split():
            return "reduce_scatter"
    return None


def step_bytes(kind: StepKind, parts: int, tensor_bytes: Bytes) -> Bytes:
    """Bytes that one group of `parts` ranks moves in total when it holds a tensor of `tensor_bytes` (Table 2).

    Exact, however uneven the pieces, but for an all_to_all, where it holds for even ones and is the
    upper bound.
    """
    match kind:
        case "all_reduce":
            return Bytes(2 * (parts - 1) * tensor_bytes)
        case "all_gather" | "reduce_scatter":
            return Bytes((parts - 1) * tensor_bytes)
        case "all_to_all":
            return Bytes((parts - 1) * tensor_bytes // parts)
        case _:
            return Bytes(0)


def axis_bytes(source: SBP, target: SBP, parts: int, tensor_bytes: Bytes) -> Bytes:
    """Bytes moved along one axis of `parts` ranks from `source` to `target` (Table 2, same devices).

    `tensor_bytes` is the size of the tensor that one group along the axis holds together. From one
    Partial to another it is reduced in pieces.
    """
    if source == target:
        return Bytes(0)
    kind = step_kind(source, target, parts) or "reduce_scatter"
    return step_bytes(kind, parts, tensor_bytes)
