"""From a batch to what each rank takes of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from weft.capture.batch import BatchSpec
from weft.errors import BatchError
from weft.ir import LogicalGraph
from weft.ir.logical import Input
from weft.layout import Layout
from weft.layout.region import Region
from weft.program.agreement import BatchSums, batch_sums
from weft.program.feeding.rows import RowsOfBatch, rows_of
from weft.program.feeding.shards import (
    in_micro_batches,
    layouts_on,
    own_part,
    region_part,
    without_shards,
)
from weft.runtime.memory.copies import laid
from weft.tensor import GlobalTensor


def stood_in(batch: Any) -> Any:
    """A batch with whole stand-ins in place of what this process has only a part of."""
    return batch.stand_in()[0] if isinstance(batch, RowsOfBatch) else without_shards(batch)[0]


@final
class Feeder:
    """Cuts the batches of a program for the ranks of this process.

    Args:
        spec: what a batch looks like.
        graph: with the layouts of its leaves.
        devices: of the ranks of this process.
        compared: true where other processes must be given the same batches, so that checksums are wanted.
    """

    def __init__(
        self,
        spec: BatchSpec,
        graph: LogicalGraph,
        devices: Mapping[int, torch.device],
        compared: bool = False,
    ) -> None:
        self._spec = spec
        self._devices = dict(devices)
        self._layouts = {rank: layouts_on(graph, rank, "batch") for rank in devices}
        self._shapes = {
            node.key: node.value.shape for node in graph.of_kind(Input) if node.role == "batch"
        }
        self._compared = compared
        # For each rank, where its part of each leaf lies.
        self._regions: dict[int, dict[str, Region]] = {
            rank: {
                key: layout.local_ranges(self._shapes[key], rank) for key, layout in keys.items()
            }
            for rank, keys in self._layouts.items()
        }

    def feeds(self, batch: Any, step: int = 0) -> tuple[dict[int, dict[str, Tensor]], BatchSums]:
        """For each rank, its part of every leaf by key, contiguous and on its device; and checksums of all of them.

        Args:
            batch: built like the example.
            step: of the program; decides how much of the batch the checksums look at.

        Raises:
            BatchError: when the batch differs from the example.
        """
        if isinstance(batch, RowsOfBatch):
            return self._feeds_of_rows(batch, step)
        leaves = self._spec.read_batch(batch)
        if leaves is None:
            return self._feeds_of_any(batch, step)
        whole = {key: self._cut(key, leaf) for key, leaf in leaves.items()}
        feeds = {
            rank: {
                key: laid(region_part(whole[key], region), device)
                for key, region in regions.items()
            }
            for (rank, regions), device in zip(
                self._regions.items(), self._devices.values(), strict=True
            )
        }
        return feeds, self._sums(leaves, {}, step)

    def rows(self, size: int) -> list[int]:
        """The rows of a batch of so many that the ranks of this process take, in order."""
        shapes = {leaf.key: leaf.shape for leaf in self._spec.tensors}
        inputs = (
            (shapes[key], shape, [each[key] for each in self._regions.values() if key in each])
            for key, shape in self._shapes.items()
        )
        return rows_of(inputs, size)

    def _feeds_of_rows(
        self, batch: RowsOfBatch, step: int
    ) -> tuple[dict[int, dict[str, Tensor]], BatchSums]:
        """The same for a batch of which this process has only some rows."""
        whole, found = batch.stand_in()
        leaves = self._spec.flatten_batch(whole)
        plain = {key: leaf for key, leaf in leaves.items() if id(leaf) not in found}
        _check_values(plain)
        rows = {key: found[id(leaf)] for key, leaf in leaves.items() if id(leaf) in found}
        feeds: dict[int, dict[str, Tensor]] = {}
        for (rank, regions), device in zip(
            self._regions.items(), self._devices.values(), strict=True
        ):
            feeds[rank] = {}
            for key, region in regions.items():
                if key in rows:
                    part = batch.part(key, rows[key], self._shapes[key], region)
                else:
                    part = region_part(self._cut(key, plain[key]), region)
                feeds[rank][key] = laid(part, device)
        if not self._compared:
            return feeds, BatchSums()
        parts = [
            (self._layouts[rank][key], part)
            for rank, own in feeds.items()
            for key, part in own.items()
            if key in rows
        ]
        sums = batch_sums(plain, {}, step).with_number(batch.samples)
        return feeds, sums.with_parts(parts, step)

    def takes(self, batch: Any) -> bool:
        """True where a batch looks as the example did."""
        try:
            self._spec.flatten_batch(stood_in(batch))
        except BatchError:
            return False
        return True

    def note_constants(self, batch: Any) -> None:
        """Note what is no tensor in a batch, for the guards to compare."""
        if self._spec.constants:
            self._spec.note_constants(stood_in(batch))

    def differs_in_shape(self, batch: Any) -> bool:
        """True where a batch is built like the example, but for shapes of its tensors."""
        return self._spec.differs_in_shape(stood_in(batch))

    def _sums(
        self, leaves: Mapping[str, Tensor], given: Mapping[str, GlobalTensor], step: int
    ) -> BatchSums:
        return batch_sums(leaves, given, step) if self._compared else BatchSums()

    def _feeds_of_any(
        self, batch: Any, step: int
    ) -> tuple[dict[int, dict[str, Tensor]], BatchSums]:
        """The same for a batch in any container, whose leaves may be global tensors."""
        whole, shards = without_shards(batch)
        leaves = self._spec.flatten_batch(whole)
        given = {key: shards[id(leaf)] for key, leaf in leaves.items() if id(leaf) in shards}
        plain = {key: leaf for key, leaf in leaves.items() if key not in given}
        _check_values(plain)
        cut = {key: self._cut(key, leaf) for key, leaf in leaves.items()}
        parts = self._in_micro_batches(given)
        feeds = {
            rank: {
                key: laid(own_part(key, cut[key], parts.get(key), layout, rank), device)
                for key, layout in self._layouts[rank].items()
            }
            for rank, device in self._devices.items()
        }
        return feeds, self._sums(plain, given, step)

    def _cut(self, key: str, leaf: Tensor) -> Tensor:
        """A whole leaf in the shape of its input: (micro-batches, part of the batch, ...) where it is cut."""
        shape = self._shapes[key]
        return leaf if leaf.shape == shape else leaf.reshape(shape)

    def _in_micro_batches(self, given: Mapping[str, GlobalTensor]) -> dict[str, GlobalTensor]:
        """Leaves that are global tensors, in the shapes of their inputs."""
        layouts: dict[str, Layout] = {}
        for every in self._layouts.values():
            layouts.update(every)
        return {
            key: in_micro_batches(leaf, self._shapes[key], layouts[key])
            for key, leaf in given.items()
            if key in layouts
        }


def _check_values(leaves: Mapping[str, Tensor]) -> None:
    for key, leaf in leaves.items():
        if leaf.is_meta:
            raise BatchError(
                f"the batch's leaf {key!r} is on the meta device and has no values; an example may be so, but pass "
                "a step a batch with data"
            )
