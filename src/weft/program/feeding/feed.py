"""From a batch to what each rank takes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from weft.capture.batch import BatchSpec
from weft.errors import BatchError
from weft.ir import LogicalGraph
from weft.ir.logical import Input
from weft.layout import Layout
from weft.layout.layout import Region
from weft.program.checksums import BatchSums, batch_sums
from weft.program.feeding.cut import CutBatch, CutParts, uncut
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


def stood_in(batch: Any) -> Any:
    """A batch with whole stand-ins in place of what this process has only a part of."""
    batch = uncut(batch)
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
        inputs = [node for node in graph.of_kind(Input) if node.role == "batch"]
        self._shapes = {node.key: node.value.shape for node in inputs}
        self._names = {node.key: node.value.name for node in inputs}
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
            batch: built like the example; what was cut ahead as this one cuts is taken as it is.
            step: of the program; decides how much of the batch the checksums look at.

        Raises:
            BatchError: when the batch differs from the example.
        """
        alike = isinstance(batch, CutBatch) and self._cuts_as(batch.feeder)
        cut = (batch.take() if alike else None) or self.cut(uncut(batch))
        return cut.parts, self._sums(cut, step)

    def cut(self, batch: Any) -> CutParts:
        """The parts of a batch. Other ranks are needed only where leaves are global tensors; else any thread may call.

        Raises:
            BatchError: when the batch differs from the example.
        """
        if isinstance(batch, RowsOfBatch):
            return self._cut_rows(batch)
        leaves = self._spec.read_batch(batch)
        if leaves is None:
            return self._cut_any(batch)
        whole = {key: self._in_shape(key, leaf) for key, leaf in leaves.items()}
        parts = {
            rank: {
                key: laid(region_part(whole[key], region), device)
                for key, region in regions.items()
            }
            for (rank, regions), device in zip(
                self._regions.items(), self._devices.values(), strict=True
            )
        }
        return CutParts(parts, leaves)

    @property
    def first(self) -> int:
        """The first rank of this process."""
        return next(iter(self._devices))

    def loaded_leaves(self, rows: Sequence[int] | None) -> list[LoadedLeaf]:
        """The leaves of a batch as they are loaded here, and cut.

        Args:
            rows: of a batch that this process loads; None for all.
        """
        names = {rank: str(each) for rank, each in self._devices.items() if each.type != "cpu"}
        return [
            LoadedLeaf(
                *(leaf.key, self._names[leaf.key], _loaded_shape(leaf.shape, rows), leaf.dtype),
                {rank: each[leaf.key] for rank, each in self._regions.items() if leaf.key in each},
                names,
            )
            for leaf in self._spec.tensors
        ]

    def rows(self, size: int) -> list[int]:
        """The rows of a batch of so many that the ranks of this process take, in order."""
        shapes = {leaf.key: leaf.shape for leaf in self._spec.tensors}
        inputs = (
            (shapes[key], shape, [each[key] for each in self._regions.values() if key in each])
            for key, shape in self._shapes.items()
        )
        return rows_of(inputs, size)

    def _cut_rows(self, batch: RowsOfBatch) -> CutParts:
        """The same for a batch of which this process has only some rows."""
        whole, found = batch.stand_in()
        leaves = self._spec.flatten_batch(whole)
        plain = {key: leaf for key, leaf in leaves.items() if id(leaf) not in found}
        _check_values(plain)
        rows = {key: found[id(leaf)] for key, leaf in leaves.items() if id(leaf) in found}
        parts: dict[int, dict[str, Tensor]] = {}
        for (rank, regions), device in zip(
            self._regions.items(), self._devices.values(), strict=True
        ):
            parts[rank] = {}
            for key, region in regions.items():
                if key in rows:
                    part = batch.part(key, rows[key], self._shapes[key], region)
                else:
                    part = region_part(self._in_shape(key, plain[key]), region)
                parts[rank][key] = laid(part, device)
        return CutParts(parts, plain, rows=frozenset(rows), samples=batch.samples)

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

    def _cuts_as(self, other: object) -> bool:
        """True where another one makes the same parts of every batch that this one takes."""
        return self is other or (
            isinstance(other, Feeder)
            and self._regions == other._regions
            and self._shapes == other._shapes
            and self._devices == other._devices
            and self._spec == other._spec
        )

    def _sums(self, cut: CutParts, step: int) -> BatchSums:
        if not self._compared:
            return BatchSums()
        sums = batch_sums(cut.plain, cut.given, step)
        if cut.samples is None:
            return sums
        parts = [
            (self._layouts[rank][key], part)
            for rank, own in cut.parts.items()
            for key, part in own.items()
            if key in cut.rows
        ]
        return sums.with_number(cut.samples).with_parts(parts, step)

    def _cut_any(self, batch: Any) -> CutParts:
        """The same for a batch in any container, whose leaves may be global tensors."""
        whole, shards = without_shards(batch)
        leaves = self._spec.flatten_batch(whole)
        given = {key: shards[id(leaf)] for key, leaf in leaves.items() if id(leaf) in shards}
        plain = {key: leaf for key, leaf in leaves.items() if key not in given}
        _check_values(plain)
        shaped = {key: self._in_shape(key, leaf) for key, leaf in leaves.items()}
        brought = self._in_micro_batches(given)
        parts = {
            rank: {
                key: laid(own_part(key, shaped[key], brought.get(key), layout, rank), device)
                for key, layout in self._layouts[rank].items()
            }
            for rank, device in self._devices.items()
        }
        return CutParts(parts, plain, given)

    def _in_shape(self, key: str, leaf: Tensor) -> Tensor:
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


def _loaded_shape(shape: tuple[int, ...], rows: Sequence[int] | None) -> tuple[int, ...]:
    return shape if rows is None or not shape else (min(shape[0], len(rows)), *shape[1:])


def _check_values(leaves: Mapping[str, Tensor]) -> None:
    for key, leaf in leaves.items():
        if leaf.is_meta:
            raise BatchError(
                f"the batch's leaf {key!r} is on the meta device and has no values; an example may be so, but pass "
                "a step a batch with data"
            )
