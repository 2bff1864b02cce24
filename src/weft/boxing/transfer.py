"""Transfers: from one placement to another, each rank sends just what others need and receives just what it lacks.

Every rank of the target needs a region of the tensor. What it holds already, as a rank of the source, it keeps; of
every other shard of the source it gets the intersection, from one of the ranks that hold it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from weft.boxing.step import Step
from weft.layout import Layout, Region, overlap, region_size, within

# (place of a peer in the group, region of the local tensor)
Piece: TypeAlias = tuple[int, Region]


@dataclass(frozen=True, slots=True)
class LocalTransfer:
    """One rank's part in a transfer.

    Attributes:
        ranks: the ranks of both placements, those of the source first; `index` is this rank's place among them.
        input_shape, output_shape: local shapes before and after; None where the rank is in only one placement.
        sends: for each peer in turn, the region of the input that it gets; this rank itself is a peer too.
        receives: for each peer in turn, the region of the output that comes from it.
        bytes: what crosses between ranks, over all of them.
    """

    ranks: tuple[int, ...]
    index: int
    input_shape: tuple[int, ...] | None
    output_shape: tuple[int, ...] | None
    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]
    bytes: int


def transfer_ranks(step: Step) -> tuple[int, ...]:
    """The ranks that a transfer brings together, in the order of its communicator."""
    return tuple(dict.fromkeys(step.source.placement.ranks + step.target.placement.ranks))


def local_transfer(step: Step, shape: tuple[int, ...], rank: int) -> LocalTransfer:
    """What `rank`, of one of the placements or both, does in `step` on a tensor of whole `shape`."""
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


def transfer_elements(source: Layout, target: Layout, shape: tuple[int, ...]) -> int:
    """Elements that cross between ranks in a transfer."""
    here = source.placement.coordinates
    before = [
        source.local_ranges(shape, rank) if rank in here else None
        for rank in target.placement.ranks
    ]
    after = [target.local_ranges(shape, rank) for rank in target.placement.ranks]
    return missing_elements(before, after)


def missing_elements(before: Sequence[Region | None], after: Sequence[Region]) -> int:
    """Elements that ranks must receive, given the regions that each of them holds (None: nothing) and needs."""
    return sum(
        region_size(needed) - (0 if held is None else region_size(overlap(held, needed)))
        for held, needed in zip(before, after, strict=True)
    )


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
