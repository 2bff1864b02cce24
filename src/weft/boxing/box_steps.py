"""A chain of boxing as one rank's local nodes: collectives, transfers and local calls; and who talks to whom."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast, final

from weft.boxing.transfer import (
    EXCHANGES,
    BoxingStep,
    StepKind,
    local_transfer,
    step_bytes,
    transfer_ranks,
)
from weft.errors import LayoutError
from weft.ir.logical import Arg
from weft.ir.plan import Collective, CollectiveKind, LocalCall, LocalNode, LocalValue, Transfer
from weft.layout import (
    SBP,
    Broadcast,
    Layout,
    Partial,
    Reduction,
    Split,
    neutral,
    shard_range,
    shard_sizes,
)
from weft.units import ITEM_SIZE, NO_BYTES, Bytes

# From the ranks of a group, in its order, to its communicator's id.
CommunicatorOf = Callable[[tuple[int, ...]], int]


def step_groups(step: BoxingStep) -> Sequence[tuple[int, ...]]:
    """The groups of ranks that talk to each other in a step, each in its order."""
    if step.kind == "transfer":
        return (transfer_ranks(step),)
    return step.source.placement.groups(step.axis) if step.kind in EXCHANGES else ()


def step_node(
    step: BoxingStep,
    source: str,
    output: str,
    shape: tuple[int, ...],
    dtype: str,
    rank: int,
    communicator_of: CommunicatorOf,
) -> LocalNode | None:
    """The node that `rank` runs for one step of boxing.

    Args:
        communicator_of: the communicator of a group.

    Returns:
        None when there is nothing to do: the rank takes no part, or the tensor does not change.

    Raises:
        LayoutError: when `dtype` does not take a reduction of the step.
    """
    step.source.check_dtype(dtype)
    step.target.check_dtype(dtype)
    holds, gets = (rank in each.placement.coordinates for each in (step.source, step.target))
    if step.kind == "transfer" and (holds or gets):
        moved = local_transfer(step, shape, rank)
        given, made = (
            None if held is None else LocalValue(name, held, dtype)
            for name, held in ((source, moved.input_shape), (output, moved.output_shape))
        )
        id = communicator_of(moved.ranks)
        return Transfer(id, given, made, moved.sends, moved.receives, moved.bytes)
    if not holds or step.kind == "reinterpret":
        return None
    local = local_step(step, shape, ITEM_SIZE[dtype], rank)
    before = LocalValue(source, local.input_shape, dtype)
    after = LocalValue(output, local.output_shape, dtype)
    if step.kind not in EXCHANGES:
        args = (before.ref, *_arguments(local, dtype))
        return LocalCall.of(f"weft.{_OPS[step.kind]}", args, (after,))
    return Collective(
        cast(CollectiveKind, step.kind),
        communicator_of(local.ranks),
        before,
        after,
        local.reduction,
        local.dim,
        local.split_dim,
        local.sizes,
        local.split_sizes,
        local.bytes,
    )


_OPS = {"slice": "slice", "pad": "pad", "keep_first": "keep"}


def _arguments(local: LocalStep, dtype: str) -> tuple[Arg, ...]:
    """The arguments after the tensor; what stands around or in place of it only where it is not zero."""
    if local.kind == "slice":
        return local.dim, local.offset, local.length
    element = neutral(local.reduction, dtype)
    around = (element,) if element else ()
    if local.kind == "pad":
        return local.dim, local.offset, local.length, *around
    return local.index == 0, *around


@final
@dataclass(frozen=True, slots=True)
class LocalStep:
    """One rank's part in a step on one placement.

    Attributes:
        kind: as in the step. A "keep_first" keeps the tensor where `index` is 0 and puts the
            neutral element of `reduction` in its place elsewhere; a "reinterpret" leaves it as it
            is.
        ranks: the group along the step's axis; `index` is this rank's place in it.
        input_shape, output_shape: local shapes before and after.
        reduction: for all_reduce and reduce_scatter; for pad and keep_first, of the result.
        dim: dimension that is sliced, padded, gathered, scattered, or (all_to_all) concatenated.
        split_dim: for all_to_all: dimension that is cut into pieces for the peers.
        sizes: length along `dim` of every rank's piece, for all_gather, reduce_scatter and
            all_to_all.
        split_sizes: for all_to_all: lengths along `split_dim` of the pieces for each rank.
        offset: for slice: where this rank's piece starts along `dim`; for pad: where the tensor is in the result.
        length: for slice and pad: length of the result along `dim`.
        bytes: sent between the ranks of this group in total.
    """

    kind: StepKind
    ranks: tuple[int, ...]
    index: int
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    reduction: Reduction = "sum"
    dim: int = 0
    split_dim: int = 0
    sizes: tuple[int, ...] = ()
    split_sizes: tuple[int, ...] = ()
    offset: int = 0
    length: int = 0
    bytes: Bytes = NO_BYTES


def local_step(step: BoxingStep, shape: tuple[int, ...], itemsize: int, rank: int) -> LocalStep:
    """The work of `rank` in `step` on a tensor of whole `shape` with elements of `itemsize` bytes.

    All ranks of a group see the same tensor: the one that the group holds together. Its pieces
    are balanced shards, so peers know each other's sizes.
    """
    placement = step.source.placement
    group = placement.group(rank, step.axis)
    parts, index = len(group), group.index(rank)
    held = step.source.with_axis(step.axis, Broadcast()).local_shape(shape, rank)
    before, after = step.source.sbp[step.axis], step.target.sbp[step.axis]
    dim, split_dim = _dims(step.kind, before, after)
    pieces = shard_sizes(held[dim], parts) if dim is not None else ()
    offset = length = 0
    if dim is not None and step.kind in ("slice", "pad"):
        offset, length = shard_range(held[dim], parts, index)
        length = length if step.kind == "slice" else held[dim]
    reductions = (sbp.reduction for sbp in (before, after) if isinstance(sbp, Partial))
    return LocalStep(
        kind=step.kind,
        ranks=group,
        index=index,
        input_shape=step.source.local_shape(shape, rank),
        output_shape=step.target.local_shape(shape, rank),
        reduction=next(reductions, "sum"),
        dim=dim or 0,
        split_dim=split_dim or 0,
        sizes=() if step.kind in ("slice", "pad") else pieces,
        split_sizes=shard_sizes(held[split_dim], parts) if split_dim is not None else (),
        offset=offset,
        length=length,
        bytes=_group_bytes(step, parts, held, itemsize),
    )


def _group_bytes(step: BoxingStep, parts: int, held: tuple[int, ...], itemsize: int) -> Bytes:
    before, after = step.source.sbp[step.axis], step.target.sbp[step.axis]
    if step.kind != "all_to_all" or not isinstance(before, Split) or not isinstance(after, Split):
        return step_bytes(step.kind, parts, Bytes(math.prod(held) * itemsize))
    rows, columns = shard_sizes(held[before.dim], parts), shard_sizes(held[after.dim], parts)
    kept = sum(n * m for n, m in zip(rows, columns, strict=True))
    area = held[before.dim] * held[after.dim]
    return Bytes((math.prod(held) - math.prod(held) // area * kept) * itemsize if area else 0)


def _dims(kind: StepKind, before: SBP, after: SBP) -> tuple[int | None, int | None]:
    """`dim` and `split_dim` of a step, None if it has none."""
    if kind == "reinterpret":
        return None, None
    if isinstance(before, Split):
        return before.dim, after.dim if isinstance(after, Split) else None
    return after.dim if isinstance(after, Split) else None, None


def gradient_layout(layout: Layout) -> Layout:
    """The layout in which a gradient is complete without communication: S→S, B→P(sum), P(sum)→B.

    Every rank differentiates with respect to its own local tensor. Each rank uses its own copy of
    what is Broadcast, so that the gradients add up; each part of a sum has the gradient of the sum.
    The function is its own inverse.

    Raises:
        LayoutError: for a Partial of another reduction, which is not linear; box it to Broadcast
            before.
    """
    for sbp in layout.sbp:
        if isinstance(sbp, Partial) and sbp != Partial("sum"):
            raise LayoutError(
                f"no gradient passes P({sbp.reduction}), which is not linear, in {layout}; "
                "box the tensor to B or to a split first"
            )
    duals: dict[SBP, SBP] = {Broadcast(): Partial("sum"), Partial("sum"): Broadcast()}
    return Layout(layout.placement, tuple(duals.get(sbp, sbp) for sbp in layout.sbp))
