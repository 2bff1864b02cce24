"""`weft.expert_mm` and what belongs to it (`weft.ops.rules.experts`) on local tensors.

Rows come in any order: each expert's are taken out, multiplied, and put in their places. Experts
without rows cost nothing, nor do rows without an expert, such as the padding of buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from weft.errors import UserError


def segments(offs: Tensor, rows: int, first: int) -> Tensor:
    """`weft.segments`: how many ends lie at or before each of the rows from `first`."""
    places = torch.arange(first, first + rows, device=offs.device, dtype=offs.dtype)
    return torch.searchsorted(offs, places, right=True)


def expert_mm(x: Tensor, w: Tensor, ids: Tensor, offset: int) -> Tensor:
    """`weft.expert_mm`: rows [s, k] or [b, r, k] times the matrices [e, k, n] of their experts."""
    if ids.dim() == 2:
        flat = expert_mm(x.flatten(0, 1), w, _numbered(ids, w.shape[0]), 0)
        return flat.view(*ids.shape, w.shape[-1])
    made = x.new_zeros(x.shape[0], w.shape[-1])
    for expert, rows in _rows_of(ids - offset if offset else ids, w.shape[0]):
        made.index_copy_(0, rows, x.index_select(0, rows) @ w[expert])
    return made


def expert_gradient(x: Tensor, g: Tensor, ids: Tensor, experts: int, offset: int) -> Tensor:
    """`weft.expert_gradient`: `x[rows]ᵀ g[rows]` of each expert, [e, k, n]."""
    if ids.dim() == 2:
        ids = _numbered(ids, experts)
        return expert_gradient(x.flatten(0, 1), g.flatten(0, 1), ids, experts, 0)
    made = x.new_zeros(experts, x.shape[-1], g.shape[-1])
    for expert, rows in _rows_of(ids - offset if offset else ids, experts):
        torch.mm(x.index_select(0, rows).t(), g.index_select(0, rows), out=made[expert])
    return made


def _numbered(ids: Tensor, experts: int) -> Tensor:
    """Experts of all blocks [b, r], counted from the first block's, -1 for none: [b·r]."""
    each = experts // ids.shape[0]
    first = torch.arange(0, experts, each, device=ids.device).unsqueeze(1)
    return (ids + first).masked_fill_((ids < 0) | (ids >= each), -1).flatten()


def _rows_of(ids: Tensor, experts: int) -> Iterator[tuple[int, Tensor]]:
    """Each expert that has rows, with their numbers in order."""
    keys = ids.masked_fill((ids < 0) | (ids >= experts), experts)
    order = keys.argsort(dim=0, stable=True)
    counts = torch.bincount(keys, minlength=experts + 1).tolist()
    for expert, rows in enumerate(order.split(counts)[:experts]):
        if rows.numel():
            yield expert, rows


def routes(ids: Tensor, experts: int, groups: int, blocks: int, capacity: int) -> Tensor:
    """`weft.routes`: the place of each row in its group's buffer [blocks · capacity], -1 for none.

    Raises:
        UserError: when a group has more rows for a block than `capacity`.
    """
    block = ids.div(experts // blocks, rounding_mode="floor").view(groups, -1)
    block = block.masked_fill_((ids < 0).view_as(block) | (block >= blocks), blocks)
    order = block.argsort(dim=1, stable=True)
    counts = block.new_zeros(groups, blocks + 1)
    counts.scatter_add_(1, block, torch.ones_like(block))
    _check(counts[:, :blocks], capacity, block.shape[1])
    # Of the rows in order, the first of each block is the `start`th.
    start = counts.cumsum(1) - counts
    sorted_blocks = block.gather(1, order)
    place = torch.arange(block.shape[1], device=ids.device) - start.gather(1, sorted_blocks)
    place = (place + sorted_blocks * capacity).masked_fill_(sorted_blocks == blocks, -1)
    return torch.empty_like(place).scatter_(1, order, place).view(-1)


def _check(counts: Tensor, capacity: int, rows: int) -> None:
    largest = counts.max() if counts.numel() else None
    if largest is None or capacity >= rows:
        return
    if counts.device.type != "cpu":  # without waiting for the device
        torch._assert_async(largest <= capacity)
    elif int(largest) > capacity:
        even = rows / counts.shape[1]
        raise UserError(
            f"a rank has {int(largest)} rows for the experts of another, of its {rows}; the buffers hold {capacity}: "
            f"weft.expert_parallel(capacity=…) of {int(largest) / even:.3g} or more would do, or None, which holds all"
        )


def dispatch(
    x: Tensor, places: Tensor, groups: int, blocks: int, capacity: int, around: int, first: int
) -> Tensor:
    """`weft.dispatch`: rows [s, …] at their places in [blocks, groups · capacity, …]."""
    made = x.new_full((groups, blocks * capacity, *x.shape[1:]), around)
    ours, target = _targets(places, groups, blocks, capacity, first)
    made.flatten(0, 1)[target] = x[ours]
    made = made.view(groups, blocks, capacity, *x.shape[1:]).transpose(0, 1)
    return made.reshape(blocks, groups * capacity, *x.shape[1:])


def combine(z: Tensor, places: Tensor, groups: int, capacity: int, first: int) -> Tensor:
    """`weft.combine`: rows [s, …] from their places in [blocks, groups · capacity, …], zeros where they have none."""
    blocks = z.shape[0]
    made = z.new_zeros(places.shape[0], *z.shape[2:])
    ours, target = _targets(places, groups, blocks, capacity, first)
    group, place = target // (blocks * capacity), target % (blocks * capacity)
    column = group * capacity + place % capacity
    made[ours] = z[place // capacity, column]
    return made


def _targets(
    places: Tensor, groups: int, blocks: int, capacity: int, first: int
) -> tuple[Tensor, Tensor]:
    """The rows that go to the blocks from `first`, and where in [groups · blocks · capacity]."""
    local = places - first * capacity
    ours = ((places >= 0) & (local >= 0) & (local < blocks * capacity)).nonzero().squeeze(1)
    group = ours // max(places.shape[0] // groups, 1)
    return ours, local[ours] + group * (blocks * capacity)


EXPERT_OPS: dict[str, Callable[..., Any]] = {
    "weft.segments": segments,
    "weft.expert_mm": expert_mm,
    "weft.expert_gradient": expert_gradient,
    "weft.routes": routes,
    "weft.dispatch": dispatch,
    "weft.combine": combine,
}
