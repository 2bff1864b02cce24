"""Transfers: each rank sends just what others need and receives just what it lacks, of two placements or one.

Every rank of the target needs a region of the tensor. What it holds already, as a rank of the
source, it keeps; of every other shard of the source it gets the intersection, from one of the ranks
that hold it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from weft.boxing.step import BoxingStep
from weft.layout import SBP, Layout, Placement, Region, Split, overlap, region_size, within
from weft.units import Bytes

# (place of a peer in the group, region of the local tensor)
Piece: TypeAlias = tuple[int, Region]
State: TypeAlias = tuple[SBP, ...]
Indices: TypeAlias = npt.NDArray[np.int64]


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
    return tuple(dict.fromkeys(step.source.placement.ranks + step.target.placement.ranks))


def local_transfer(step: BoxingStep, shape: tuple[int, ...], rank: int) -> LocalTransfer:
    """The work of `rank`, of one of the placements or both, in `step` on a tensor of whole `shape`."""
    ranks = transfer_ranks(step)
    before, after = step.source, step.target
    held = before.local_ranges(shape, rank) if rank in before.placement.coordinates else None
    wanted = after.local_ranges(shape, rank) if rank in after.placement.coordinates else None
    sends, receives = [], []
    for sender, receiver, region in _routes(before, after, shape):
        if sender == rank and held is not None:
            sends.append((ranks.index(receiver), within(region, held)))
        if receiver == rank and wanted is not None:
            receives.append((ranks.index(sender), within(region, wanted)))
    return LocalTransfer(
        ranks,
        ranks.index(rank),
        None if held is None else before.local_shape(shape, rank),
        None if wanted is None else after.local_shape(shape, rank),
        tuple(sends),
        tuple(receives),
        step.bytes,
    )


def crossing(
    here: Layout, placement: Placement, states: tuple[State, ...], shape: tuple[int, ...]
) -> list[int]:
    """Elements that cross between ranks in a transfer from `here` to each of `states` on `placement`.

    The SBPs of `here` and of `states` are Split or Broadcast.
    """
    starts, ends = regions_of(states, placement.shape, shape)
    own_starts, own_ends = regions_of((here.sbp,), here.placement.shape, shape)
    places = {rank: place for place, rank in enumerate(here.placement.ranks)}
    columns = [place for place, rank in enumerate(placement.ranks) if rank in places]
    rows = [places[placement.ranks[place]] for place in columns]
    common = _overlaps(starts[:, columns], ends[:, columns], own_starts[:, rows], own_ends[:, rows])
    found: list[int] = (_sizes(starts, ends) - common).tolist()
    return found


def missing_elements(
    before: State, after: State, grid: tuple[int, ...], shape: tuple[int, ...]
) -> int:
    """Elements that the ranks of a grid must receive, all together, to go from one state to another.

    The states have no Partial.
    """
    held, wanted = (regions_of((state,), grid, shape) for state in (before, after))
    return int((_sizes(*wanted) - _overlaps(*wanted, *held))[0])


@lru_cache(maxsize=4096)
def regions_of(
    states: tuple[State, ...], grid: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[Indices, Indices]:
    """Starts and ends of the regions of each state: arrays [states, ranks, dimensions]."""
    found = [_state_regions(state, grid, shape) for state in states]
    table = np.array(found, dtype=np.int64).reshape(len(states), 2, math.prod(grid), len(shape))
    return table[:, 0], table[:, 1]


@lru_cache(maxsize=4096)
def _state_regions(state: State, grid: tuple[int, ...], shape: tuple[int, ...]) -> Indices:
    """Starts and ends of the regions of one state, as `shard_region` has them: an array [2, ranks, dimensions].

    All positions at once, with the arithmetic of `shard_range`.
    """
    positions = np.indices(grid, dtype=np.int64).reshape(len(grid), -1)
    starts = np.zeros((positions.shape[1], len(shape)), dtype=np.int64)
    lengths = starts + np.array(shape, dtype=np.int64)
    for sbp, parts, index in zip(state, grid, positions, strict=True):
        if isinstance(sbp, Split):
            base, extra = np.divmod(lengths[:, sbp.dim], parts)
            starts[:, sbp.dim] += index * base + np.minimum(index, extra)
            lengths[:, sbp.dim] = base + (index < extra)
    return np.stack((starts, starts + lengths))


def _sizes(starts: Indices, ends: Indices) -> Indices:
    """For each state, the elements of the regions of all ranks together."""
    found: Indices = (ends - starts).prod(axis=-1).sum(axis=-1)
    return found


def _overlaps(starts: Indices, ends: Indices, own_starts: Indices, own_ends: Indices) -> Indices:
    """For each state, the elements that ranks need and hold already."""
    common = np.maximum(starts, own_starts)
    return _sizes(common, np.maximum(np.minimum(ends, own_ends), common))


@lru_cache(maxsize=4096)
def _routes(
    source: Layout, target: Layout, shape: tuple[int, ...]
) -> tuple[tuple[int, int, Region], ...]:
    """(sender, receiver, region of the whole tensor) of every piece, those that stay where they are included.

    Of several ranks that hold a piece, the one that has sent least so far sends it.
    """
    holders: dict[Region, list[int]] = {}
    for rank in source.placement.ranks:
        holders.setdefault(source.local_ranges(shape, rank), []).append(rank)
    sent = dict.fromkeys(source.placement.ranks, 0)
    found = []
    for receiver in target.placement.ranks:
        needed = target.local_ranges(shape, receiver)
        for held, ranks in holders.items():
            region = overlap(held, needed)
            if not region_size(region):
                continue
            sender = receiver if receiver in ranks else min(ranks, key=sent.__getitem__)
            sent[sender] += region_size(region) * (sender != receiver)
            found.append((sender, receiver, region))
    return tuple(found)
