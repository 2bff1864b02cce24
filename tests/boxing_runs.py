"""Boxing run on ranks, for the tests in one process and on real ones: each check is what one rank does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from boxing_values import Case, counted, scatter
from weft.boxing import steps
from weft.ir.plan import Communicator
from weft.layout import (
    Broadcast,
    Layout,
    Partial,
    Split,
    broadcast_layout,
    placement,
    reductions_of,
)
from weft.runtime.channels.channel import Channel
from weft.tensor.boxing import box_groups, run_steps
from weft.units import ITEM_SIZE

ChannelOf = Callable[[tuple[int, ...]], Channel]
EVERYONE = (0, 1, 2, 3)
SHAPES = ((3, 5), (7,), (), (0, 2))
DTYPES = ("bool", "uint8", "int16", "int32", "int64", "bfloat16", "float32", "float64", "complex64")


def communicators(cases: list[Case]) -> tuple[Communicator, ...]:
    """Those that the checks below need."""
    groups = [EVERYONE, *placement("cpu", [[0, 1], [2, 3]]).groups(0)]
    groups += placement("cpu", [[0, 1], [2, 3]]).groups(1)
    for shape, source, target, _ in cases:
        groups += box_groups(source, target, shape, torch.float64)
        groups += box_groups(target, broadcast_layout(target.placement), shape, torch.float64)
    return tuple(Communicator(id, ranks) for id, ranks in enumerate(dict.fromkeys(groups)))


def channels_by_ranks(found: tuple[Communicator, ...], channels: dict[int, Channel]) -> ChannelOf:
    """The `channel_of` that boxing asks."""
    return {group.ranks: channels[group.id] for group in found if group.id in channels}.__getitem__


def sent_bytes(channel_of: ChannelOf, groups: tuple[tuple[int, ...], ...], rank: int) -> int:
    """What this rank has sent so far on some channels."""
    return sum(channel_of(ranks).sent.total() for ranks in groups if rank in ranks)


def check_recorded(rank: int, case: Case, channel_of: ChannelOf) -> int:
    """The local tensor is the recorded one; back on Broadcast it is the whole. Returns the bytes that the rank sent."""
    shape, source, target, expected = case
    whole = torch.from_numpy(counted(shape)).double()
    held = scatter(counted(shape), source)
    mine = torch.from_numpy(held[rank]).double() if rank in held else None
    groups = box_groups(source, target, shape, whole.dtype)
    before = sent_bytes(channel_of, groups, rank)
    found = run_steps(mine, source, target, shape, whole.dtype, rank, channel_of)
    sent = sent_bytes(channel_of, groups, rank) - before
    if expected[rank] is None:
        assert found is None
    elif Partial() not in target.sbp:
        assert found is not None
        assert found.equal(torch.tensor(expected[rank], dtype=whole.dtype))
    everywhere = broadcast_layout(target.placement)
    back = run_steps(found, target, everywhere, shape, whole.dtype, rank, channel_of)
    assert back is None or back.equal(whole)
    return sent


def planned_bytes(case: Case) -> int:
    """What the chain of a case states that all ranks send."""
    shape, source, target, _ = case
    return sum(step.bytes for step in steps(source, target, shape, ITEM_SIZE["float64"]))


def check_reductions(
    rank: int, dtype: str, channel_of: ChannelOf, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> None:
    """Every reduction that `dtype` takes, to and from every other layout, on an uneven and an empty shard."""
    kind = getattr(torch, dtype)
    line, grid = placement("cpu", [0, 1, 2, 3]), placement("cpu", [[0, 1], [2, 3]])
    for shape in shapes:
        for source, target in _layouts(dtype, shape, line.axes):
            ends = Layout(line, source), Layout(line, target)
            check_value(rank, kind, shape, *ends, channel_of)
        for reduction in reductions_of(dtype):
            nested = Layout(grid, (Partial(reduction), Partial("sum")))
            check_value(rank, kind, shape, nested, broadcast_layout(grid), channel_of)


def _layouts(
    dtype: str, shape: tuple[int, ...], axes: int
) -> Iterator[tuple[tuple[Partial, ...], tuple[Broadcast | Split | Partial, ...]]]:
    partials = [Partial(reduction) for reduction in reductions_of(dtype)]
    others = [Broadcast(), *partials, *map(Split, range(len(shape)))]
    for one, other in product(partials, others):
        yield (one,) * axes, (other,) * axes
        yield (other,) * axes, (one,) * axes  # type: ignore[misc]


def check_value(
    rank: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    source: Layout,
    target: Layout,
    channel_of: ChannelOf,
) -> None:
    """From `source` to `target` and on to Broadcast the value stays the same."""
    whole = _value(dtype, shape)
    mine = _local(whole, source, rank)
    found = run_steps(mine, source, target, shape, dtype, rank, channel_of)
    assert found is not None
    assert found.shape == target.local_shape(shape, rank)
    assert found.dtype == dtype
    everywhere = broadcast_layout(target.placement)
    back = run_steps(found, target, everywhere, shape, dtype, rank, channel_of)
    assert back is not None
    assert back.equal(whole), (dtype, shape, source, target, back, whole)


def _value(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(np.asarray(counted(shape) % (2 if dtype == torch.bool else 11))).to(
        dtype
    )


def _local(whole: Tensor, layout: Layout, rank: int) -> Tensor:
    """This rank's part of a value that fits into small integers."""
    if whole.dtype != torch.bool:
        plain = (whole.real if whole.is_complex() else whole).to(torch.int64)
        return torch.from_numpy(scatter(plain.numpy(), layout)[rank]).to(whole.dtype)
    logical = {"sum": "or", "max": "or", "prod": "and", "min": "and"}
    sbps = tuple(
        Partial(logical.get(sbp.reduction, sbp.reduction)) if isinstance(sbp, Partial) else sbp
        for sbp in layout.sbp
    )
    bits = scatter(whole.to(torch.int64).numpy(), Layout(layout.placement, sbps))[rank]
    return torch.from_numpy(np.asarray(bits & 1)).bool()


def check_gathered(values: list[list[int]], cases: list[Case]) -> None:
    """What the ranks sent for each case adds up to what the chains state."""
    for case, *sent in zip(cases, *values, strict=True):
        assert sum(sent) == planned_bytes(case), case
