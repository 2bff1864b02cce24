"""Halos: the border rows that ranks fetch from each other before a convolution or pooling along a split dimension.

The op's rule says which rows each rank reads (`weft.ops.windows`). The exchange
is not a chain of boxing, because windows overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from weft.cached import cached_property
from weft.ir.logical import Value
from weft.ir.plan import LocalValue, Transfer
from weft.layout import Region, Split, overlap, region_shape, region_size, shard_range, within
from weft.ops import OpCall, Signature, localize, windows
from weft.ops.windows import slides_at, window_signatures
from weft.units import ITEM_SIZE, Bytes


@final
@dataclass(frozen=True)
class Halo:
    """One exchange of border rows.

    Attributes:
        value: what is fetched, with its layout.
        groups: the ranks that talk to each other.
        wanted: for each rank of the placement, in its order, the region of the whole value that it
            reads.
    """

    value: Value
    groups: tuple[tuple[int, ...], ...]
    wanted: tuple[Region, ...]

    @cached_property
    def held(self) -> dict[int, Region]:
        """The region that each rank holds."""
        layout, shape = self.value.laid, self.value.shape
        return {rank: layout.local_ranges(shape, rank) for rank in layout.placement.ranks}

    @cached_property
    def read(self) -> dict[int, Region]:
        """The region that each rank reads."""
        return dict(zip(self.held, self.wanted, strict=True))

    def bytes(self, group: tuple[int, ...]) -> Bytes:
        """Bytes that cross between the ranks of a group."""
        missing = 0
        for rank in group:
            kept = overlap(self.held[rank], self.read[rank])
            missing += region_size(self.read[rank]) - region_size(kept)
        return Bytes(missing * ITEM_SIZE[self.value.dtype])

    @property
    def total(self) -> Bytes:
        """Bytes that cross between ranks in all groups."""
        return Bytes(sum(map(self.bytes, self.groups)))

    def group_of(self, rank: int) -> tuple[int, ...]:
        """The group of a rank."""
        return next(group for group in self.groups if rank in group)

    def transfer(self, rank: int, communicator: int, source: str, output: str) -> Transfer:
        """The transfer that `rank` runs."""
        group, dtype = self.group_of(rank), self.value.dtype
        sends, receives = [], []
        for place, peer in enumerate(group):
            given = overlap(self.held[rank], self.read[peer])
            if region_size(given):
                sends.append((place, within(given, self.held[rank])))
            taken = overlap(self.held[peer], self.read[rank])
            if region_size(taken):
                receives.append((place, within(taken, self.read[rank])))
        return Transfer(
            communicator,
            LocalValue(source, region_shape(self.held[rank]), dtype),
            LocalValue(output, region_shape(self.read[rank]), dtype),
            tuple(sends),
            tuple(receives),
            self.bytes(group),
        )


def call_halos(
    call: OpCall, chosen: Sequence[Signature], values: Sequence[Value]
) -> dict[int, Halo]:
    """The exchanges that a call needs, by the numbers of its operands."""
    placement = values[0].laid.placement
    if not _on_windows(call, chosen, placement.shape):
        return {}
    places = placement.coordinates.values()
    read = [_regions(call, chosen, placement.shape, place) for place in places]
    found = {}
    for number, value in enumerate(values):
        layout = value.laid
        wanted = tuple(regions[number] for regions in read)
        held = [layout.local_ranges(value.shape, rank) for rank in placement.ranks]
        axes = [
            axis
            for axis, sbp in enumerate(layout.sbp)
            if isinstance(sbp, Split)
            and any(one[sbp.dim] != other[sbp.dim] for one, other in zip(wanted, held, strict=True))
        ]
        if axes:
            groups: dict[tuple[int, ...], list[int]] = {}
            for rank, place in placement.coordinates.items():
                others = tuple(at for axis, at in enumerate(place) if axis not in axes)
                groups.setdefault(others, []).append(rank)
            found[number] = Halo(value, tuple(map(tuple, groups.values())), wanted)
    return found


def _regions(
    call: OpCall, chosen: Sequence[Signature], grid: Sequence[int], place: Sequence[int]
) -> list[Region]:
    regions = [[(0, size) for size in spec.shape] for spec in call.operands]
    for signature, parts, index in zip(chosen, grid, place, strict=True):
        found = windows(call, signature, parts, index)
        for region, sbp, window in zip(regions, signature.operands, found, strict=True):
            if isinstance(sbp, Split):
                start, length = region[sbp.dim]
                cut = window[1:] if window else shard_range(length, parts, index)
                region[sbp.dim] = (start + cut[0], cut[1])
        call = localize(call, signature, parts, index)
    return [tuple(region) for region in regions]


def _on_windows(call: OpCall, chosen: Sequence[Signature], grid: Sequence[int]) -> bool:
    """True if a call is split along a dimension along which its kernel slides; the same on all ranks."""
    if not slides_at(call.op):
        return False
    for signature, parts in zip(chosen, grid, strict=True):
        if signature in window_signatures(call, parts):
            return True
        call = localize(call, signature, parts, 0)
    return False
