"""Layouts of any grid: shards tile the tensor, however small it is; regions and what they have in common."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from weft.errors import LayoutError
from weft.layout import (
    SBP,
    Broadcast,
    Layout,
    Partial,
    Placement,
    Split,
    overlap,
    region_size,
    shard_range,
    shard_sizes,
    within,
)

B, S0, S1 = Broadcast(), Split(0), Split(1)


def test_shards_are_balanced_and_may_be_empty() -> None:
    assert shard_sizes(5, 4) == (2, 1, 1, 1)
    assert shard_sizes(2, 4) == (1, 1, 0, 0)
    assert shard_sizes(0, 3) == (0, 0, 0)
    assert [shard_range(2, 4, index) for index in range(4)] == [(0, 1), (1, 1), (2, 0), (2, 0)]


@pytest.mark.parametrize("shape", [(7, 5), (1, 3), (0, 4), (2, 2)])
@pytest.mark.parametrize(
    "sbp", list(product((B, S0, S1), repeat=3)), ids=lambda sbp: "".join(map(str, sbp))
)
def test_shards_tile_the_tensor(shape: tuple[int, ...], sbp: tuple[SBP, ...]) -> None:
    """Every element lies on as many ranks as the Broadcast axes have positions."""
    where = Placement("cpu", (2, 3, 2), tuple(range(100, 112)))
    layout, held = Layout(where, sbp), np.zeros(shape, dtype=int)
    for rank in where.ranks:
        (row, rows), (column, columns) = layout.local_ranges(shape, rank)
        held[row : row + rows, column : column + columns] += 1
        assert layout.local_shape(shape, rank) == (rows, columns)
    copies = np.prod([n for n, s in zip(where.shape, sbp, strict=True) if s == B], dtype=int)
    assert (held == copies).all()


def test_nested_splits_differ_from_one_split_over_all() -> None:
    nested = Layout(Placement("cpu", (2, 2), (0, 1, 2, 3)), (S0, S0))
    flat = Layout(Placement("cpu", (4,), (0, 1, 2, 3)), (S0,))
    assert [nested.local_shape((5,), rank)[0] for rank in range(4)] == [2, 1, 1, 1]
    assert [nested.local_shape((6,), rank)[0] for rank in range(4)] == [2, 1, 2, 1]
    assert [flat.local_shape((6,), rank)[0] for rank in range(4)] == [2, 2, 1, 1]


def test_a_tensor_without_dimensions_is_whole_everywhere() -> None:
    layout = Layout(Placement("cpu", (2, 2), (0, 1, 2, 3)), (B, Partial("max")))
    layout.check(())
    assert [layout.local_ranges((), rank) for rank in range(4)] == [()] * 4
    with pytest.raises(LayoutError, match="splits dimension 0"):
        Layout(layout.placement, (B, S0)).check(())


def test_regions() -> None:
    one, other = ((0, 4), (2, 3)), ((3, 4), (0, 3))
    assert overlap(one, other) == ((3, 1), (2, 1))
    assert region_size(overlap(one, ((4, 2), (0, 9)))) == 0
    assert region_size(()) == region_size(overlap((), ())) == 1
    assert within(((3, 1), (2, 1)), other) == ((0, 1), (2, 1))
