"""From a batch to what each rank takes of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from weft.capture.batch import BatchSpec, TensorLeaf, leaves_of, spread
from weft.capture.tree import flatten, unflatten
from weft.errors import BatchError
from weft.ir import LogicalGraph
from weft.ir.logical import Input, Role
from weft.layout import Layout, Shares
from weft.layout.layout import Region, region_shape
from weft.program.checksums import BatchChecksums, batch_checksums
from weft.runtime.memory.state import Arrival, laid, region_part
from weft.tensor import GlobalTensor


def layouts_of_shards(batch: Any) -> dict[str, Layout]:
    """The layouts of those entries of a batch that are global tensors, by key."""
    leaves, _ = flatten(batch, "batch")
    return {key: leaf.spec.layout for key, leaf in leaves if isinstance(leaf, GlobalTensor)}


@final
@dataclass(frozen=True, eq=False)
class RowsOfBatch:
    """Some rows of a batch. `Program.step` takes it as it takes the whole batch.

    Attributes:
        batch: collated of these rows alone: tensors with as many rows.
        rows: their places in the whole batch, of `size` rows, in order.
        samples: a checksum of the numbers of all its samples, the same on all processes.
        sums: checksums of samples that all processes loaded, to be compared before the step.
    """

    batch: Any
    rows: Sequence[int]
    size: int
    samples: int = 0
    sums: Mapping[str, Any] = field(default_factory=dict)

    def part(self, key: str, leaf: Tensor, shape: tuple[int, ...], region: Region) -> Tensor:
        """The region of a leaf's input that a rank takes; raises BatchError where this process has not all rows of it.

        `leaf` has the rows of this process; `shape` is the input's: [batch, …], or [micro-batches, part of the batch,
        …].
        """
        cut = len(shape) > leaf.dim()
        wanted = rows_in(shape, region, cut)
        places = {row: place for place, row in enumerate(self.rows)}
        missing = [row for row in wanted if row not in places]
        if missing:
            raise BatchError(
                f"batch leaf {key} is laid out differently in this program than in the one that the loader was made "
                "with: row "
                f"{missing[0]} was not loaded by this process; make a loader with the program that reads it, as "
                "weft.Loader(…, evaluation), or give it split=False"
            )
        own = [places[row] for row in wanted]
        if not own or own[-1] - own[0] + 1 == len(own):  # a view
            picked = leaf.narrow(0, own[0] if own else 0, len(own))
        else:
            picked = leaf.index_select(0, torch.tensor(own, device=leaf.device))
        whole = ((0, len(wanted)), *region[1 + cut :])
        return region_part(picked, whole).reshape(region_shape(region))


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
    """A batch that `feeder` has cut ahead of its step. `Program.step` takes it as it takes the batch, `whole`."""

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


def whole_batch_of(batch: Any) -> Any:
    """The batch as a step takes it, whether it was cut ahead or not."""
    return batch.whole if isinstance(batch, CutBatch) else batch


def is_on_the_host(batch: Any) -> bool:
    """True if all tensors of a batch are plain ones of the host: cutting them needs no stream and no other rank."""
    leaves, _ = flatten(batch.batch if isinstance(batch, RowsOfBatch) else batch, "batch")
    return all(
        type(leaf) is torch.Tensor and leaf.device.type == "cpu"
        for _, leaf in leaves
        if isinstance(leaf, Tensor)
    )


@final
@dataclass(frozen=True)
class LoadedLeaf:
    """An entry of the batch: its key for users, the name of its input, its shape as this process loads it.

    `parts`: the region of the input that each rank of this process takes, with a dimension more for micro-batches;
    `devices`: of these ranks, by name.
    """

    key: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: Mapping[int, Region] = field(default_factory=dict)
    devices: Mapping[int, str] = field(default_factory=dict)


@final
class WholeBatch:
    """The whole batch of the entries of a batch, with stand-ins without values if this process has only a part.

    A tensor that has not as many rows as `RowsOfBatch` is the same for the whole batch, and stands for itself.

    Attributes:
        rows: that this process has; None if it has all of plain tensors.
        held: by the id of a stand-in, what this process has: rows, or parts of a global tensor.
        nest: of the leaves of the whole batch.
    """

    def __init__(self, batch: Any) -> None:
        batch = whole_batch_of(batch)
        self.rows = batch if isinstance(batch, RowsOfBatch) else None
        own = batch if self.rows is None else self.rows.batch
        self.held: dict[int, Tensor] = {}
        leaves, tree = leaves_of(own)
        wholes = [self._whole(leaf) for _, leaf in leaves]
        alike = all(x is y for (_, x), y in zip(leaves, wholes, strict=True))
        self.nest = own if alike else unflatten(wholes, tree)

    def _whole(self, leaf: Any) -> Any:
        if isinstance(leaf, GlobalTensor):
            shape = tuple(leaf.shape)
        elif self.rows is None:
            return leaf
        elif not isinstance(leaf, Tensor):
            return spread(leaf, len(self.rows.rows), self.rows.size)
        elif leaf.dim() and leaf.shape[0] == len(self.rows.rows):
            shape = (self.rows.size, *leaf.shape[1:])
        else:
            return leaf
        stand_in = torch.empty(shape, dtype=leaf.dtype, device="meta")
        self.held[id(stand_in)] = leaf
        return stand_in


@final
class Feeder:
    """Cuts the batches of a program for the ranks of this process; `compared`: with those of other processes."""

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

    def feeds(
        self, batch: Any, step: int = 0
    ) -> tuple[dict[int, dict[str, Tensor]], BatchChecksums]:
        """Each rank's part of every leaf by key, contiguous and on its device; and checksums of all leaves.

        `batch` may be cut ahead; `step` decides how much of it the checksums read. Raises BatchError where it differs
        from the example.
        """
        other = batch.feeder if isinstance(batch, CutBatch) else None
        alike = other is self or (
            isinstance(other, Feeder)
            and self._regions == other._regions
            and self._shapes == other._shapes
            and self._devices == other._devices
            and self._spec == other._spec
        )
        cut = (batch.take() if alike else None) or self.cut(whole_batch_of(batch))
        if not self._compared:
            return cut.parts, BatchChecksums()
        parts = (
            (self._layouts[rank][key], part)
            for rank, own in cut.parts.items()
            for key, part in own.items()
            if key in cut.rows
        )
        return cut.parts, batch_checksums(cut.plain, cut.given, step, cut.samples, parts)

    def cut(self, batch: Any) -> CutParts:
        """The parts of a batch. Other ranks are needed only where leaves are global tensors; else any thread may call.

        Raises BatchError when the batch differs from the example.
        """
        rows, held = batch if isinstance(batch, RowsOfBatch) else None, dict[str, Tensor]()
        leaves = self._spec.read_batch(batch) if rows is None else None
        if leaves is None:  # in any container, or global tensors, or only some rows are here
            whole_batch = WholeBatch(batch)
            leaves = self._spec.flatten_batch(whole_batch.nest)
            own = whole_batch.held
            held = {key: own[id(leaf)] for key, leaf in leaves.items() if id(leaf) in own}
            leaves = {key: leaf for key, leaf in leaves.items() if key not in held}
            for key, leaf in leaves.items():
                if leaf.is_meta:
                    raise BatchError(
                        f"the batch's leaf {key!r} is on the meta device and has no values; an example may be so, but "
                        "pass a step a batch with data"
                    )
        shards = {key: leaf for key, leaf in held.items() if isinstance(leaf, GlobalTensor)}
        laid_parts = {key: self._parts_of(key, leaf) for key, leaf in shards.items()}
        whole = {
            key: leaf if leaf.shape == self._shapes[key] else leaf.reshape(self._shapes[key])
            for key, leaf in leaves.items()
        }

        def part(key: str, rank: int) -> Tensor:
            region = self._regions[rank][key]
            if key in shards:
                return laid_parts[key][rank]
            if rows is not None and key in held:
                return rows.part(key, held[key], self._shapes[key], region)
            return region_part(whole[key], region)

        parts = {
            rank: {key: laid(part(key, rank), device) for key in self._regions[rank]}
            for rank, device in self._devices.items()
        }
        samples = None if rows is None else rows.samples
        return CutParts(parts, leaves, shards, held.keys() - shards.keys(), samples)

    @property
    def first(self) -> int:
        """The first rank of this process."""
        return next(iter(self._devices))

    def loaded_leaves(self, rows: Sequence[int] | None) -> list[LoadedLeaf]:
        """The entries of a batch as they are loaded here, and cut; `rows` are those that are loaded, None for all."""
        names = {rank: str(each) for rank, each in self._devices.items() if each.type != "cpu"}

        def shape(leaf: TensorLeaf) -> tuple[int, ...]:
            if rows is None or not leaf.shape:
                return leaf.shape
            return min(leaf.shape[0], len(rows)), *leaf.shape[1:]

        return [
            LoadedLeaf(
                *(leaf.key, self._names[leaf.key], shape(leaf), leaf.dtype),
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

    def _parts_of(self, key: str, leaf: GlobalTensor) -> Mapping[int, Tensor]:
        """The parts of a leaf that is a global tensor, of the ranks that take some; it is brought where it is cut."""
        layout = next((own[key] for own in self._layouts.values() if key in own), None)
        if layout is None:
            return {}
        if tuple(leaf.shape) != self._shapes[key]:
            with torch.no_grad():
                cut: Any = leaf.reshape(self._shapes[key])
                leaf = cut.to_global(placement=layout.placement, sbp=layout.sbp)
        if leaf.spec.layout != layout:
            raise BatchError(
                f"batch leaf {key} is laid out as {leaf.spec.layout}, the program was compiled for {layout}; "
                f"name the layout in Strategy(batch={{{key!r}: …}}), or bring the tensor there with to_global"
            )
        return leaf.shards()

    def takes(self, batch: Any) -> bool:
        """True if a batch looks as the example did."""
        try:
            self._spec.flatten_batch(WholeBatch(batch).nest)
        except BatchError:
            return False
        return True

    def note_constants(self, batch: Any) -> None:
        """Note what is not a tensor in a batch, for the guards to compare."""
        if self._spec.constants:
            self._spec.note_constants(WholeBatch(batch).nest)

    def differs_in_shape(self, batch: Any) -> bool:
        """True if a batch is built like the example, but for shapes of its tensors."""
        return self._spec.differs_in_shape(WholeBatch(batch).nest)


def layouts_on(graph: LogicalGraph, rank: int, *roles: Role) -> dict[str, Layout]:
    """The layouts of the inputs of some roles that `rank` holds a part of, by key."""
    return {
        node.key: node.value.layout
        for node in graph.of_kind(Input)
        if node.role in roles
        and node.value.layout is not None
        and rank in node.value.layout.placement.coordinates
    }


def shares_of(graph: LogicalGraph) -> dict[str, Shares]:
    """The variables that are stored in shares, by key."""
    inputs = graph.of_kind(Input)
    return {node.key: node.shares for node in inputs if node.shares is not None}


def rows_in(shape: tuple[int, ...], region: Region, cut: bool) -> list[int]:
    """The rows of a batch that are in a region of an input, in its order; `cut` where that is of micro-batches."""
    first, count = region[0]
    if not cut:
        return list(range(first, first + count))
    begin, length = region[1]
    return [
        micro * shape[1] + row
        for micro in range(first, first + count)
        for row in range(begin, begin + length)
    ]


def rows_of(
    inputs: Iterable[tuple[tuple[int, ...], tuple[int, ...], Sequence[Region]]], size: int
) -> list[int]:
    """The rows of a batch of `size` that some ranks take; `inputs`: each leaf's shape, its input's, the regions."""
    rows: set[int] = set()
    for leaf, shape, regions in inputs:
        if leaf[:1] != (size,):
            return list(range(size))
        for region in regions:
            rows.update(rows_in(shape, region, len(shape) > len(leaf)))
    return sorted(rows)
