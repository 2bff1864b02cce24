"""Transfers: each rank sends just what others need and receives just what it lacks, of two placements or one.

Who sends what to whom: `weft.boxing.routes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from weft.boxing.numbered import all_ranks, numbered_layouts, rank_numbers
from weft.boxing.overlaps import Ends, overlaps
from weft.boxing.regions import Indices, State, regions_of
from weft.boxing.routes import routes
from weft.boxing.step import BoxingStep
from weft.cached import cached_property
from weft.ir.plan_nodes import Piece
from weft.layout import Layout, Placement
from weft.units import Bytes


@final
@dataclass(frozen=True, slots=True)
class LocalTransfer:
    """One rank's part in a transfer.

    Attributes:
        ranks: the ranks of both placements, those of the source first; `index` is this rank's place
            among them.
        input_shape, output_shape: local shapes before and after; None where the rank is in only one
            placement.
        sends: for each peer in turn, the region of the input that it gets; this rank itself is a
            peer too.
        receives: for each peer in turn, the region of the output that comes from it.
        bytes: what crosses between ranks, over all of them.
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
    """Elements that cross between ranks in transfers to layouts of one placement.

    Attributes:
        placement: on which the transfers end.
        states: SBPs, each Split or Broadcast, in which they end.
        shape: whole shape of the tensor.
    """

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
