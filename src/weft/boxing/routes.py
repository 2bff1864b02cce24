"""Routes of a transfer: which rank sends which piece of a tensor to whom.

Every rank of the target needs a region of the tensor. A rank of the source keeps the elements that
it already holds. For every other source shard, the rank receives the intersection from a rank that holds the shard: the
rank that has sent least so far, the first if several have.

Pieces are computed lazily for one rank or one shard, because each pair of ranks may have a piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from heapq import heapreplace
from typing import NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from weft.boxing.overlaps import Indices, regions_of
from weft.ir.plan_nodes import Piece
from weft.layout import Layout, Placement

# Boxing depends on two placements only through their grids and common ranks. With ranks numbered again, steps and
# routes are found once for all pairs that are alike, such as the neighbouring stages of a pipeline.


@lru_cache(maxsize=4096)
def all_ranks(source: Placement, target: Placement) -> tuple[int, ...]:
    """The ranks of two placements, each once: those of the source first."""
    return tuple(dict.fromkeys(source.ranks + target.ranks))


@lru_cache(maxsize=4096)
def rank_numbers(source: Placement, target: Placement) -> dict[int, int]:
    """The place of each rank among the ranks of two placements."""
    return {rank: number for number, rank in enumerate(all_ranks(source, target))}


@lru_cache(maxsize=4096)
def renumbered_placements(source: Placement, target: Placement) -> tuple[Placement, Placement]:
    """The two placements with ranks renumbered by their places among the ranks of both.

    Equal pairs give the same two objects.
    """
    numbers = rank_numbers(source, target)
    found = (
        _placement(each.device_type, each.shape, tuple([numbers[rank] for rank in each.ranks]))
        for each in (source, target)
    )
    return next(found), next(found)


def numbered_layouts(source: Layout, target: Layout) -> tuple[Layout, Layout]:
    """The two layouts on placements that are numbered again."""
    here, there = renumbered_placements(source.placement, target.placement)
    return Layout(here, source.sbp), Layout(there, target.sbp)


@lru_cache(maxsize=4096)
def _placement(device_type: str, shape: tuple[int, ...], ranks: tuple[int, ...]) -> Placement:
    return Placement(device_type, shape, ranks)


Mask: TypeAlias = npt.NDArray[np.bool_]


@final
class ShardPieces(NamedTuple):
    """The pieces of one shard of the source.

    Attributes:
        places: of their receivers on the target's grid, in order.
        senders: the number of the rank that sends each.
        starts, lengths: of each in the whole tensor, [pieces, dimensions].
    """

    places: Indices
    senders: Indices
    starts: Indices
    lengths: Indices


@lru_cache(maxsize=1024)
def routes(source: Layout, target: Layout, shape: tuple[int, ...]) -> Routes:
    """The routes from one layout to another, without a Partial, of a tensor of whole `shape`.

    Args:
        source, target: on placements whose ranks are numbered by their places in the communicator, those of the
            source first (`numbered_layouts`).
        shape: of the whole tensor.
    """
    return Routes(source, target, shape)


@final
class Routes:
    """The routes of a transfer between ranks that are numbered by their places in its communicator.

    Attributes:
        shards: the regions of the source that differ, in the order of their first holders: [shards, dimensions, 2],
            starts and ends.
        shard_of: the number of the shard of each rank of the source.
        needed: the region of each rank of the target, [places, dimensions, 2].
    """

    __slots__ = (
        "_held",
        "_holders",
        "_numbers",
        "_places",
        "_received",
        "needed",
        "shard_of",
        "shards",
    )

    def __init__(self, source: Layout, target: Layout, shape: tuple[int, ...]) -> None:
        held, self.needed = _regions(source, shape), _regions(target, shape)
        first, self.shard_of = distinct_rows(held)
        self.shards = held[first]
        by_shard = np.argsort(self.shard_of, kind="stable")
        self._holders = np.split(by_shard, np.cumsum(np.bincount(self.shard_of))[:-1])
        self._numbers = np.array(target.placement.ranks, dtype=np.int64)
        self._places = {number: place for place, number in enumerate(target.placement.ranks)}
        # The shard that each rank of the target holds as one of the source; -1 for none.
        self._held = np.full(len(self._numbers), -1, dtype=np.int64)
        both = self._numbers < len(self.shard_of)
        self._held[both] = self.shard_of[self._numbers[both]]
        self._received: dict[int, tuple[Piece, ...]] = {}

    def sends(self, number: int) -> tuple[Piece, ...]:
        """For each peer of a rank in turn, the region of its shard that the peer gets."""
        if number >= len(self.shard_of):
            return ()
        shard = int(self.shard_of[number])
        given = self.given(shard)
        own = given.senders == number
        starts = given.starts[own] - self.shards[shard, :, 0]
        peers = self._numbers[given.places[own]]
        return tuple(_pieces(peers, starts, given.lengths[own]))

    def receives(self, number: int) -> tuple[Piece, ...]:
        """For each shard in turn, the region that a rank needs of the shard, and the rank that sends it."""
        if number not in self._places:
            return ()
        if number not in self._received:
            place = self._places[number]
            shards, starts, lengths = _common(self.shards, self.needed[place])
            senders = np.array(
                [self._sender(shard, place) for shard in shards.tolist()], dtype=np.int64
            )
            found = _pieces(senders, starts - self.needed[place, :, 0], lengths)
            self._received[number] = tuple(found)
        return self._received[number]

    def _sender(self, shard: int, place: int) -> int:
        """The rank that sends its piece of a shard to the rank at a place of the target."""
        holders = self._holders[shard]
        if self._held[place] == shard:
            return int(self._numbers[place])
        if len(holders) == 1:
            return int(holders[0])
        given = self.given(shard)
        return int(given.senders[np.searchsorted(given.places, place)])

    def given(self, shard: int) -> ShardPieces:
        """The pieces of a shard."""
        places, starts, lengths = _common(self.needed, self.shards[shard])
        senders, holders = self._numbers[places], self._holders[shard]
        asked = self._held[places] != shard
        senders[asked] = holders[_in_turn(lengths[asked].prod(axis=1), len(holders))]
        return ShardPieces(places, senders, starts, lengths)

    def taken(self, place: int) -> Indices:
        """The lengths of the pieces that the rank at a place of the target gets: [pieces, dimensions]."""
        return _common(self.shards, self.needed[place])[2]


def distinct_rows(rows: Indices) -> tuple[Indices, Indices]:
    """The first of equal entries of an array along its first axis, in order; for each entry, which of these it is."""
    flat = rows.reshape(len(rows), -1)
    if not flat.shape[1]:
        return np.zeros(1, dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    _, first, of = np.unique(flat, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[of.reshape(-1)]


def _regions(layout: Layout, shape: tuple[int, ...]) -> Indices:
    starts, ends = regions_of((layout.sbp,), layout.placement.shape, shape)
    return np.stack((starts[0], ends[0]), axis=-1)


def _common(regions: Indices, other: Indices) -> tuple[Indices, Indices, Indices]:
    """The places of regions that have elements in common with another, and the starts and lengths of these."""
    starts = np.maximum(regions[:, :, 0], other[:, 0])
    lengths = np.minimum(regions[:, :, 1], other[:, 1]) - starts
    places = np.flatnonzero((lengths > 0).all(axis=1))
    return places, starts[places], lengths[places]


def _in_turn(sizes: Indices, holders: int) -> Indices:
    """For each piece in turn, the holder that sends it: the one that has sent least so far, of equal ones the first."""
    if holders == 1 or (sizes == sizes[:1]).all():
        return np.arange(len(sizes)) % holders
    sent = [(0, place) for place in range(holders)]
    found = []
    for size in sizes.tolist():
        least, place = sent[0]
        found.append(place)
        heapreplace(sent, (least + size, place))
    return np.array(found, dtype=np.int64)


def _pieces(peers: Indices, starts: Indices, lengths: Indices) -> Iterator[Piece]:
    regions = np.stack((starts, lengths), axis=-1).tolist()
    for peer, region in zip(peers.tolist(), regions, strict=True):
        yield peer, tuple(map(tuple, region))
