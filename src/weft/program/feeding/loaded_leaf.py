"""A leaf of the batch as one process loads it, and the regions that its ranks take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from weft.layout.region import Region


@final
@dataclass(frozen=True)
class LoadedLeaf:
    """A leaf of the batch.

    Attributes:
        key: for users.
        name: of its input.
        shape: as this process loads it.
        dtype: "float32".
        parts: for each rank of this process that takes some of it, the region of the input, which has a dimension
            more where there are micro-batches.
        devices: of these ranks, by name.
    """

    key: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: Mapping[int, Region] = field(default_factory=dict)
    devices: Mapping[int, str] = field(default_factory=dict)
