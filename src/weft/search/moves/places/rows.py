"""Rows of a grid of ranks: what of a stage's ranks another stage gets, along the first axis that has several."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from weft.layout import Placement


def row_count(placement: Placement) -> int:
    """The number of rows of a grid along its first axis of several ranks; 1 without any."""
    return placement.shape[_axis(placement)]


def some_rows(placement: Placement, rows: Sequence[int]) -> Placement:
    """The ranks of some rows.

    Args:
        placement: the grid.
        rows: their numbers; one at least.
    """
    axis = _axis(placement)
    inner = prod(placement.shape[axis + 1 :])
    ranks = [placement.ranks[row * inner + place] for row in rows for place in range(inner)]
    return _like(placement, axis, len(rows), ranks)


def joined_rows(one: Placement, other: Placement) -> Placement | None:
    """The ranks of both, in their order; None where their rows are not of the same shape."""
    axis = min(_axis(one), _axis(other))
    if one.axes != other.axes or one.shape[axis + 1 :] != other.shape[axis + 1 :]:
        return None
    blocks = _blocks(one, axis) | _blocks(other, axis)
    return _like(one, axis, len(blocks), [rank for block in sorted(blocks) for rank in block])


def _blocks(placement: Placement, axis: int) -> set[tuple[int, ...]]:
    """The ranks of each row."""
    inner, ranks = prod(placement.shape[axis + 1 :]), placement.ranks
    return {ranks[place : place + inner] for place in range(0, len(ranks), inner)}


def _axis(placement: Placement) -> int:
    return next((axis for axis, size in enumerate(placement.shape) if size > 1), 0)


def _like(placement: Placement, axis: int, count: int, ranks: Sequence[int]) -> Placement:
    shape = (*placement.shape[:axis], count, *placement.shape[axis + 1 :])
    return Placement(placement.device_type, shape, tuple(ranks))
