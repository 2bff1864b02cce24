"""A chain of boxing as one rank's local nodes: collectives, transfers and local calls; and who talks to whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from weft.boxing.local import LocalStep, local_step
from weft.boxing.step import EXCHANGES, BoxingStep
from weft.boxing.transfer import local_transfer, transfer_ranks
from weft.ir.logical import Arg, Ref
from weft.ir.plan import (
    Collective,
    CollectiveKind,
    LocalCall,
    LocalNode,
    LocalValue,
    Transfer,
)
from weft.layout import neutral
from weft.units import ITEM_SIZE

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
        step: the step.
        source, output: names of the local values before and after.
        shape, dtype: of the whole tensor.
        rank: any rank of the job.
        communicator_of: the communicator of a group.

    Returns:
        None when nothing is to be done: the rank has no part in it, or the tensor stays as it is.

    Raises:
        LayoutError: when `dtype` does not take a reduction of the step.
    """
    step.source.check_dtype(dtype)
    step.target.check_dtype(dtype)
    if step.kind == "transfer":
        return _transfer(step, source, output, shape, dtype, rank, communicator_of)
    if rank not in step.source.placement.coordinates or step.kind == "reinterpret":
        return None
    local = local_step(step, shape, ITEM_SIZE[dtype], rank)
    after = LocalValue(output, local.output_shape, dtype)
    if step.kind not in EXCHANGES:
        return LocalCall(
            f"weft.{_OPS[step.kind]}", (Ref(source), *_call(local, dtype)), (), (after,)
        )
    return Collective(
        cast(CollectiveKind, step.kind),
        communicator_of(local.ranks),
        LocalValue(source, local.input_shape, dtype),
        after,
        local.reduction,
        local.dim,
        local.split_dim,
        local.sizes,
        local.split_sizes,
        local.bytes,
    )


_OPS = {"slice": "slice", "pad": "pad", "keep_first": "keep"}


def _call(local: LocalStep, dtype: str) -> tuple[Arg, ...]:
    """The arguments after the tensor; what stands around or in place of it only where it is not zero."""
    if local.kind == "slice":
        return local.dim, local.offset, local.length
    element = neutral(local.reduction, dtype)
    around = (element,) if element else ()
    if local.kind == "pad":
        return local.dim, local.offset, local.length, *around
    return local.index == 0, *around


def _transfer(
    step: BoxingStep,
    source: str,
    output: str,
    shape: tuple[int, ...],
    dtype: str,
    rank: int,
    communicator_of: CommunicatorOf,
) -> Transfer | None:
    if not any(rank in each.placement.coordinates for each in (step.source, step.target)):
        return None
    local = local_transfer(step, shape, rank)
    before, after = (
        None if held is None else LocalValue(name, held, dtype)
        for name, held in ((source, local.input_shape), (output, local.output_shape))
    )
    communicator = communicator_of(local.ranks)
    return Transfer(communicator, before, after, local.sends, local.receives, local.bytes)
