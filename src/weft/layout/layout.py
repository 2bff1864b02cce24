"""Layout: a placement and one SBP for each axis of its grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from weft.cached import cached_property
from weft.errors import LayoutError
from weft.layout.placement import Placement
from weft.layout.reduction import check_reduction
from weft.layout.region import Region, region_shape, shard_region
from weft.layout.sbp import SBP, Broadcast, Partial, Split


@final
@dataclass(frozen=True)
class Layout:
    """The layout of a tensor: `sbp[i]` says how it lies along axis `i` of `placement`.

    Splits of the same dimension on several axes nest: the first axis cuts the whole dimension, the
    next cuts the pieces.
    """

    placement: Placement
    sbp: tuple[SBP, ...]

    def __post_init__(self) -> None:
        if len(self.sbp) != self.placement.axes:
            raise LayoutError(
                f"a layout needs one SBP for each of the {self.placement.axes} axes of {self.placement}, "
                f"found ({', '.join(map(str, self.sbp))}); give one for each, B where nothing is split"
            )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Layouts are looked up all the time."""
        return hash((self.placement, self.sbp))

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise LayoutError when a split names a dimension that a tensor of `shape` does not have."""
        for sbp in self.sbp:
            if isinstance(sbp, Split) and not 0 <= sbp.dim < len(shape):
                raise LayoutError(
                    f"{self} splits dimension {sbp.dim}, but the tensor of shape {list(shape)} has dimensions "
                    f"0 to {len(shape) - 1}; split one of these, or use weft.broadcast"
                )

    def check_dtype(self, dtype: str) -> None:
        """Raise LayoutError when a tensor of `dtype` cannot be reduced as a Partial of this layout says."""
        for sbp in self.sbp:
            if isinstance(sbp, Partial):
                check_reduction(sbp.reduction, dtype)

    def local_ranges(self, shape: tuple[int, ...], rank: int) -> Region:
        """(offset, length) of each dimension of the part that `rank` holds of a tensor of whole `shape`."""
        position = self.placement.coordinates[rank]
        return shard_region(shape, self.sbp, self.placement.shape, position)

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Shape of the part that `rank` holds of a tensor of whole `shape`."""
        return region_shape(self.local_ranges(shape, rank))

    def with_axis(self, axis: int, sbp: SBP) -> Layout:
        """This layout with another SBP on one axis."""
        return Layout(self.placement, self.sbp[:axis] + (sbp,) + self.sbp[axis + 1 :])

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.sbp))}) on {self.placement}"


def broadcast_layout(placement: Placement) -> Layout:
    """The layout that holds the whole tensor on every rank of `placement`."""
    return Layout(placement, (Broadcast(),) * placement.axes)
