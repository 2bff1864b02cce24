"""Batches: which part of each leaf a rank takes, and leaves that are global tensors, cut already."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.capture.tree import flatten
from weft.errors import BatchError
from weft.ir import LogicalGraph
from weft.ir.logical import Input, Role
from weft.layout import Layout, Shares
from weft.layout.layout import Region
from weft.tensor import GlobalTensor


def without_shards(batch: Any) -> tuple[Any, dict[int, GlobalTensor]]:
    """The batch with whole stand-ins in place of global tensors, and these by the id of their stand-in."""
    shards: dict[int, GlobalTensor] = {}

    def replaced(leaf: Any) -> Any:
        if not isinstance(leaf, GlobalTensor):
            return leaf
        stand_in = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        shards[id(stand_in)] = leaf
        return stand_in

    return pytree.tree_map(replaced, batch), shards


def layouts_of_shards(batch: Any) -> dict[str, Layout]:
    """The layouts of those leaves of a batch that are global tensors, by key."""
    found, _ = flatten(batch, "batch")
    return {key: leaf.spec.layout for key, leaf in found if isinstance(leaf, GlobalTensor)}


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


def local_part(tensor: Tensor, layout: Layout, rank: int) -> Tensor:
    """The part of a whole tensor that `rank` holds, as a view."""
    return region_part(tensor, layout.local_ranges(tuple(tensor.shape), rank))


def region_part(tensor: Tensor, region: Region) -> Tensor:
    """A region of a tensor, as a view; the tensor itself when it is all of it."""
    for dim, (offset, length) in enumerate(region):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, length)
    return tensor


def in_micro_batches(leaf: GlobalTensor, shape: tuple[int, ...], layout: Layout) -> GlobalTensor:
    """A leaf of the batch in the shape of its input: (micro-batches, part of the batch, ...) where it is cut."""
    if tuple(leaf.shape) == shape:
        return leaf
    with torch.no_grad():
        cut: Any = leaf.reshape(shape)
        moved: GlobalTensor = cut.to_global(placement=layout.placement, sbp=layout.sbp)
        return moved


def own_part(
    key: str, leaf: Tensor, shard: GlobalTensor | None, layout: Layout, rank: int
) -> Tensor:
    """The part of a batch leaf that `rank` takes: cut from the whole, or brought by the rank itself.

    Raises:
        BatchError: when it lies in another layout than the program was compiled for.
    """
    if shard is None:
        return local_part(leaf, layout, rank)
    if shard.spec.layout != layout:
        raise BatchError(
            f"batch leaf {key} lies as {shard.spec.layout}, the program was compiled for {layout}; "
            f"name the layout in Strategy(batch={{{key!r}: …}}), or bring the tensor there with to_global"
        )
    return shard.shards()[rank]
