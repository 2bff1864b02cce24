"""Boxing of one tensor at once: the chain between two layouts, run on one rank as soon as it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from weft.boxing import steps
from weft.boxing.box_steps import step_groups, step_node
from weft.errors import InternalError
from weft.ir.plan import Collective, LocalCall, LocalNode, Transfer
from weft.layout import Layout
from weft.runtime.channels.channel import Channel
from weft.runtime.channels.collectives import run_collectives, run_transfer
from weft.runtime.kernels.local_ops import LOCAL_OPS
from weft.units import ITEM_SIZE

# From the ranks of a group, in its order, to this rank's end of a channel between exactly these.
ChannelOf = Callable[[tuple[int, ...]], Channel]


def run_steps(
    tensor: Tensor | None,
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    rank: int,
    channel_of: ChannelOf,
) -> Tensor | None:
    """Take this rank's part of a tensor from one layout to another.

    Every rank of both placements must call this with the same arguments, but for `tensor` and
    `rank`. Gradients are the caller's matter (see `weft.boxing.box_steps`): call it where
    autograd does not record.

    Args:
        tensor: this rank's local tensor; None on a rank that is not in the source's placement.
        source, target: the layouts; their placements may differ in ranks and in axes.
        shape: whole shape.
        dtype: of the tensor.
        channel_of: gives the channel of a group; `box_groups` lists the groups beforehand.

    Returns:
        The new local tensor, which may be `tensor` itself or share its memory; None on a rank that
        is not in the target's placement.

    Raises:
        LayoutError: when a layout does not fit the shape or the dtype.
    """
    for node, group in _program(source, target, shape, str(dtype).removeprefix("torch."), rank):
        tensor = _run(node, tensor, channel_of(group) if group else None)
    return tensor if rank in target.placement.coordinates else None


def box_groups(
    source: Layout, target: Layout, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that talk in a chain of boxing, in the order of their first use; the same on every rank."""
    chain = steps(source, target, shape, ITEM_SIZE[str(dtype).removeprefix("torch.")])
    return tuple(dict.fromkeys(group for step in chain for group in step_groups(step)))


@lru_cache(maxsize=4096)
def _program(
    source: Layout, target: Layout, shape: tuple[int, ...], dtype: str, rank: int
) -> tuple[tuple[LocalNode, tuple[int, ...]], ...]:
    """The nodes that `rank` runs, each with the ranks of its group; () for a local call."""
    source.check_dtype(dtype)
    target.check_dtype(dtype)
    found: list[tuple[LocalNode, tuple[int, ...]]] = []
    for step in steps(source, target, shape, ITEM_SIZE[dtype]):
        node = step_node(step, "x", "y", shape, dtype, rank, lambda _: 0)
        if node is not None:
            group = next((ranks for ranks in step_groups(step) if rank in ranks), ())
            found.append((node, group))
    return tuple(found)


def _run(node: LocalNode, tensor: Tensor | None, channel: Channel | None) -> Tensor | None:
    match node:
        case Transfer() if channel is not None:
            return run_transfer(channel, node, tensor)
        case Collective() if channel is not None and tensor is not None:
            return run_collectives(channel, (node,), [tensor])[0]
        case LocalCall(op=op, args=(_, *rest)) if tensor is not None:
            arguments: Any = rest
            made: Tensor = LOCAL_OPS[op](tensor, *arguments)
            return made
    raise InternalError(f"this rank holds nothing to run {node} on")
