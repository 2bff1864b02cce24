"""Batches of which a process has only the rows that its ranks take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from weft.capture.batch import leaves_of, spread
from weft.capture.tree import unflatten
from weft.errors import BatchError
from weft.layout.layout import Region, region_shape
from weft.program.feeding.shards import region_part


@final
@dataclass(frozen=True, eq=False)
class RowsOfBatch:
    """Some rows of a batch. `Program.step` takes it as it takes the whole batch.

    Attributes:
        batch: as it was collated of these rows alone: tensors with as many rows.
        rows: their places in the whole batch, in order.
        size: how many rows the whole batch has.
        samples: a checksum of the numbers of all its samples, which all processes must have alike.
        sums: of samples that all have loaded, to be compared before the step.
    """

    batch: Any
    rows: Sequence[int]
    size: int
    samples: int = 0
    sums: Mapping[str, Any] = field(default_factory=dict)

    def stand_in(self) -> tuple[Any, dict[int, Tensor]]:
        """The whole batch with tensors without values, and the rows of each by its id.

        A tensor that has not as many rows is the same for the whole batch, and stands there itself.
        """
        found: dict[int, Tensor] = {}

        def replaced(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return spread(leaf, len(self.rows), self.size)
            if not leaf.dim() or leaf.shape[0] != len(self.rows):
                return leaf
            whole = torch.empty((self.size, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")
            found[id(whole)] = leaf
            return whole

        leaves, tree = leaves_of(self.batch)
        return unflatten([replaced(leaf) for _, leaf in leaves], tree), found

    def part(self, key: str, leaf: Tensor, shape: tuple[int, ...], region: Region) -> Tensor:
        """The region of a leaf's input that a rank takes.

        Args:
            key: of the leaf, for errors.
            leaf: its rows.
            shape: of the input: [batch, ...], or [micro-batches, part of the batch, ...].
            region: of the input.

        Raises:
            BatchError: this process has not all rows of it.
        """
        cut = len(shape) > leaf.dim()
        wanted = rows_in(shape, region, cut)
        places = {row: place for place, row in enumerate(self.rows)}
        missing = [row for row in wanted if row not in places]
        if missing:
            raise BatchError(
                f"batch leaf {key} lies otherwise in this program than in the one that the loader was made with: row "
                f"{missing[0]} was not loaded by this process; make a loader with the program that reads it, as "
                "weft.Loader(…, evaluation), or give it split=False"
            )
        picked = _picked(leaf, [places[row] for row in wanted])
        whole = ((0, len(wanted)), *region[1 + cut :])
        return region_part(picked, whole).reshape(region_shape(region))


def rows_in(shape: tuple[int, ...], region: Region, cut: bool) -> list[int]:
    """The rows of a batch that lie in a region of an input, in its order; `cut` where that is of micro-batches."""
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
    """The rows of a batch of so many that some ranks take; all where leaves have another number of rows.

    Args:
        inputs: for each leaf its shape, that of its input, and what each rank takes of that.
        size: how many rows the whole batch has.
    """
    found: set[int] = set()
    for leaf, shape, regions in inputs:
        if leaf[:1] != (size,):
            return list(range(size))
        for region in regions:
            found.update(rows_in(shape, region, len(shape) > len(leaf)))
    return sorted(found)


def _picked(leaf: Tensor, places: Sequence[int]) -> Tensor:
    """Rows of a tensor; a view where they follow each other."""
    if not places or places[-1] - places[0] + 1 == len(places):
        return leaf.narrow(0, places[0] if places else 0, len(places))
    return leaf.index_select(0, torch.tensor(places, device=leaf.device))
