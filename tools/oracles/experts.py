"""What the ops of mixtures of experts mean, written for clarity: the oracle of the rule checker."""

from __future__ import annotations

from typing import Any

import torch


def segments(offs: Any, rows: int, first: int) -> Any:
    """`weft.segments`: the first expert whose rows end behind each row."""
    ends = offs.tolist()
    return torch.tensor([sum(end <= i for end in ends) for i in range(first, first + rows)])


def expert_mm(x: Any, w: Any, ids: Any, offset: int) -> Any:
    """`weft.expert_mm` row by row."""
    made = x.new_zeros(*ids.shape, w.shape[2])
    for place, expert in _pairs(ids, w.shape[0], offset):
        made[place] = x[place] @ w[expert]
    return made


def expert_gradient(x: Any, g: Any, ids: Any, experts: int, offset: int) -> Any:
    """`weft.expert_gradient` row by row."""
    made = x.new_zeros(experts, x.shape[-1], g.shape[-1])
    for place, expert in _pairs(ids, experts, offset):
        made[expert] += torch.outer(x[place], g[place])
    return made


def _pairs(ids: Any, experts: int, offset: int) -> list[tuple[tuple[int, ...], int]]:
    """The place of each row that has a matrix, and which."""
    each = experts // ids.shape[0] if ids.dim() == 2 else experts
    found = []
    for place in (
        torch.cartesian_prod(*map(torch.arange, ids.shape)).reshape(-1, ids.dim()).tolist()
    ):
        own = int(ids[tuple(place)]) - offset
        if 0 <= own < each:
            found.append((tuple(place), own + (each * place[0] if ids.dim() == 2 else 0)))
    return found


def routes(ids: Any, experts: int, groups: int, blocks: int, capacity: int) -> Any:
    """`weft.routes`: rows of a group take the places of their block in the order of their experts."""
    made, rows = torch.full_like(ids, -1), len(ids) // groups
    for group in range(groups):
        taken = [0] * blocks
        # Sorting is stable: the rows of an expert stay in order.
        for row in sorted(range(group * rows, (group + 1) * rows), key=lambda row: int(ids[row])):
            if 0 <= ids[row] < experts:
                block = int(ids[row]) // (experts // blocks)
                made[row] = block * capacity + taken[block]
                taken[block] += 1
    return made


def dispatch(
    x: Any,
    places: Any,
    groups: int,
    blocks: int,
    capacity: int,
    around: int,
    first: int,
    each: int,
) -> Any:
    """`weft.dispatch` row by row."""
    made = x.new_full((blocks, groups * capacity, *x.shape[1:]), around)
    for row, block, column in _targets(places, groups, capacity, first):
        if 0 <= block < blocks:
            made[block, column] = x[row // each]
    return made


def combine(z: Any, places: Any, groups: int, capacity: int, first: int, each: int) -> Any:
    """`weft.combine` row by row."""
    made = z.new_zeros(len(places) // each, *z.shape[2:])
    for row, block, column in _targets(places, groups, capacity, first):
        if 0 <= block < len(z):
            made[row // each] += z[block, column]
    return made


def _targets(places: Any, groups: int, capacity: int, first: int) -> list[tuple[int, int, int]]:
    rows = len(places) // groups
    return [
        (row, place // capacity - first, row // rows * capacity + place % capacity)
        for row, place in enumerate(places.tolist())
        if place >= 0
    ]


CHECKS: dict[str, Any] = {
    "weft.segments": segments,
    "weft.expert_mm": expert_mm,
    "weft.expert_gradient": expert_gradient,
    "weft.routes": routes,
    "weft.dispatch": dispatch,
    "weft.combine": combine,
}
