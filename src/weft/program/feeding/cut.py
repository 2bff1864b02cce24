"""Batches that were cut before their step: the parts of ranks, and the batch itself for a step that needs it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from weft.capture.tree import flatten
from weft.program.feeding.rows import RowsOfBatch
from weft.runtime.memory.arrival import Arrival
from weft.tensor import GlobalTensor


@final
@dataclass(frozen=True)
class CutParts:
    """The parts of a batch that the ranks of this process take, and what its checksums are made of.

    Attributes:
        parts: for each rank, its part of every leaf by key, contiguous and on its device.
        plain: leaves that every process has whole, by key.
        given: leaves that are global tensors, by key.
        rows: keys of leaves of which this process has only some rows.
        samples: a checksum of the numbers of all samples; None for a batch that is given whole.
    """

    parts: dict[int, dict[str, Tensor]]
    plain: Mapping[str, Tensor]
    given: Mapping[str, GlobalTensor] = field(default_factory=dict)
    rows: Collection[str] = ()
    samples: int | None = None


@final
class CutBatch:
    """A batch that was cut ahead of its step. `Program.step` takes it as it takes the batch.

    Args:
        whole: as the step takes it, padded where the program pads.
        feeder: that has cut it.
        cut: what it has made.
    """

    def __init__(self, whole: Any, feeder: object, cut: CutParts, arrival: Arrival) -> None:
        self.whole, self.feeder = whole, feeder
        self._cut: CutParts | None = cut
        self._arrival = arrival

    def take(self) -> CutParts | None:
        """The parts, for use on the current streams, which hold on to them; None when they were taken already."""
        cut, self._cut = self._cut, None
        if cut is not None:
            self._arrival.wait_for(part for own in cut.parts.values() for part in own.values())
        return cut


def uncut(batch: Any) -> Any:
    """The batch as a step takes it, whether it was cut ahead or not."""
    return batch.whole if isinstance(batch, CutBatch) else batch


def is_on_the_host(batch: Any) -> bool:
    """True where all tensors of a batch are plain ones of the host: cutting them needs no stream and no other rank."""
    found, _ = flatten(batch.batch if isinstance(batch, RowsOfBatch) else batch, "batch")
    return all(
        type(leaf) is torch.Tensor and leaf.device.type == "cpu"
        for _, leaf in found
        if isinstance(leaf, Tensor)
    )
