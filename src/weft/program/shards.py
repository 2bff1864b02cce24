"""Batches: which part of each leaf a rank takes, and leaves of which a process holds only its own part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.errors import BatchError, LayoutError, UserError
from weft.layout import SBP, Broadcast, Layout, Placement, Split
from weft.runtime.distributed import current_world


@dataclass(frozen=True)
class BatchShard:
    """A leaf of a batch of which this process holds only the parts of its own ranks.

    Attributes:
        shards: the local tensor of every rank of this process.
        layout: where the whole tensor lies.
        shape: shape of the whole tensor.
    """

    shards: Mapping[int, Tensor]
    layout: Layout
    shape: tuple[int, ...]

    def stand_in(self) -> Tensor:
        """A tensor of the whole shape and dtype, without memory."""
        dtype = next(iter(self.shards.values())).dtype
        return torch.empty(self.shape, dtype=dtype, device="meta")


def from_local(
    shard: Tensor | Mapping[int, Tensor],
    *,
    placement: Placement,
    sbp: SBP | Sequence[SBP],
    shape: Sequence[int] | None = None,
) -> BatchShard:
    """A batch leaf of which each rank has read only its own part.

    Args:
        shard: this rank's part; in a local world {rank: part}.
        placement: the placement that the program is compiled for.
        sbp: how the parts make up the whole; one SBP stands for every axis.
        shape: shape of the whole tensor; by default every split dimension counts as divided evenly.

    Raises:
        LayoutError: when an SBP is Partial, or does not fit the tensor.
        UserError: when this process has several ranks and `shard` is not a part for each.
    """
    shards = _by_rank(shard)
    every = (sbp,) * placement.axes if not isinstance(sbp, Sequence) else tuple(sbp)
    first = next(iter(shards.values()))
    layout = Layout(placement, tuple(_checked(part, first) for part in every))
    whole = list(first.shape)
    for part, size in zip(layout.sbp, placement.shape, strict=True):
        if isinstance(part, Split):
            whole[part.dim] *= size
    return BatchShard(shards, layout, tuple(shape) if shape is not None else tuple(whole))


def _by_rank(shard: Tensor | Mapping[int, Tensor]) -> dict[int, Tensor]:
    if isinstance(shard, Mapping):
        return dict(shard)
    ranks = current_world().ranks
    if len(ranks) > 1:
        raise UserError(
            f"this process has the ranks {list(ranks)}: from_local takes {{rank: part}} here, found one tensor"
        )
    return {ranks[0]: shard}


def _checked(sbp: SBP, shard: Tensor) -> SBP:
    if isinstance(sbp, Broadcast):
        return sbp
    if not isinstance(sbp, Split) or not -shard.dim() <= sbp.dim < shard.dim():
        raise LayoutError(
            f"a batch leaf of shape {list(shard.shape)} is split along one of its dimensions or broadcast, found {sbp}"
        )
    return Split(sbp.dim % shard.dim())


def without_shards(batch: Any) -> tuple[Any, dict[int, BatchShard]]:
    """The batch with whole stand-ins in place of its shards, and the shards by the id of their stand-in."""
    shards: dict[int, BatchShard] = {}

    def replaced(leaf: Any) -> Any:
        if not isinstance(leaf, BatchShard):
            return leaf
        stand_in = leaf.stand_in()
        shards[id(stand_in)] = leaf
        return stand_in

    return pytree.tree_map(replaced, batch), shards


def local_part(tensor: Tensor, layout: Layout, rank: int) -> Tensor:
    """The part of a whole tensor that `rank` holds, as a view."""
    for dim, (offset, length) in enumerate(layout.local_ranges(tuple(tensor.shape), rank)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, length)
    return tensor


def own_part(key: str, leaf: Tensor, shard: BatchShard | None, layout: Layout, rank: int) -> Tensor:
    """The part of a batch leaf that `rank` takes: cut from the whole, or brought by the rank itself.

    Raises:
        BatchError: when it lies in another layout than the program was compiled for, or has another shape.
    """
    if shard is None:
        return local_part(leaf, layout, rank)
    if shard.layout != layout:
        raise BatchError(
            f"batch leaf {key} lies as {shard.layout}, the program was compiled for {layout}; "
            f"name the layout in Strategy(batch={{{key!r}: …}})"
        )
    if rank not in shard.shards:
        raise BatchError(
            f"batch leaf {key} has no part for rank {rank}, only for {list(shard.shards)}"
        )
    part, expected = shard.shards[rank], layout.local_shape(shard.shape, rank)
    if tuple(part.shape) != expected:
        raise BatchError(
            f"batch leaf {key}: rank {rank} holds shape {list(expected)} of {list(shard.shape)}, "
            f"found {list(part.shape)}"
        )
    return part
