"""Spec: everything about a global tensor but its data; equal specs are one object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final
from weakref import WeakValueDictionary

import torch

from weft.errors import LayoutError, wrong
from weft.layout import SBP, Broadcast, Layout, Partial, Placement, Split
from weft.ops import TensorSpec
from weft.ops.cost import dtype_name
from weft.tensor.arguments import checked_placement
from weft.tensor.mesh import Mesh


@final
@dataclass(frozen=True, eq=False)
class Spec:
    """Shape, strides and dtype of the whole tensor, and where it lies; compared by identity."""

    mesh: Mesh
    layout: Layout
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def tensor(self) -> TensorSpec:
        """As the sharding rules see it."""
        return TensorSpec(self.shape, dtype_name(self.dtype))

    def with_layout(self, layout: Layout, mesh: Mesh | None = None) -> Spec:
        """The same tensor in another layout."""
        return intern(mesh or self.mesh, layout, self.shape, self.strides, self.dtype)

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{list(self.shape)} as {self.layout}"


# As long as anybody holds them.
_specs: WeakValueDictionary[tuple[object, ...], Spec] = WeakValueDictionary()


def intern(
    mesh: Mesh,
    layout: Layout,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
) -> Spec:
    """The one spec with these values."""
    key = (mesh, layout, tuple(shape), tuple(strides), dtype)
    found = _specs.get(key)
    return _specs.setdefault(key, Spec(*key)) if found is None else found


def contiguous(mesh: Mesh, layout: Layout, shape: Sequence[int], dtype: torch.dtype) -> Spec:
    """The spec of a row-major tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return intern(mesh, layout, shape, strides[::-1] if shape else (), dtype)


def layout_for(
    placement: Placement, sbp: SBP | Sequence[SBP], shape: Sequence[int], what: str
) -> Layout:
    """The layout that a user's `sbp=` means for a tensor of `shape`: one SBP stands for every axis.

    Raises:
        LayoutError: when it is no SBP, a wrong number of them, or splits a dimension that is not
            there.
    """
    checked_placement(placement, what)
    every = tuple(sbp) if isinstance(sbp, Sequence) else (sbp,) * placement.axes
    if not all(isinstance(part, Split | Broadcast | Partial) for part in every):
        expected = (
            "weft.split(dim), weft.broadcast, weft.partial(), or one of them for each of the "
            f"{placement.axes} axes of {placement}"
        )
        raise wrong(f"{what}: sbp=", expected, sbp, LayoutError)
    layout = Layout(placement, tuple(_from_front(part, len(shape)) for part in every))
    layout.check(tuple(shape))
    return layout


def _from_front(sbp: SBP, rank: int) -> SBP:
    return Split(sbp.dim + rank) if isinstance(sbp, Split) and -rank <= sbp.dim < 0 else sbp


def without_partials(layout: Layout) -> Layout:
    """The layout with Broadcast in place of every Partial: how values are made before they are boxed."""
    every = (Broadcast() if isinstance(sbp, Partial) else sbp for sbp in layout.sbp)
    return Layout(layout.placement, tuple(every))
