"""Parts made of some rows are those of the whole batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import BatchError
from weft.layout import Broadcast, Layout, Placement, Split
from weft.program.data.feed import RowsOfBatch, WholeBatch, rows_in, rows_of
from weft.runtime.memory.state import region_part


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_parts_of_rows(data: st.DataObject) -> None:
    micro, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 7))
    cut = micro > 1 or data.draw(st.booleans())
    rest = data.draw(st.sampled_from([(), (3,), (4, 2)]))
    size = micro * length
    shape = (micro, length, *rest) if cut else (size, *rest)
    grid = tuple(data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    splits = [Split(dim) for dim in range(len(shape))]
    sbp = tuple(data.draw(st.sampled_from([Broadcast(), *splits])) for _ in grid)
    layout = Layout(Placement("cpu", grid, tuple(range(torch.Size(grid).numel()))), sbp)
    leaf = torch.arange(torch.Size(shape).numel()).reshape(size, *rest)
    for rank in layout.placement.ranks:
        region = layout.local_ranges(shape, rank)
        rows = rows_of([((size, *rest), shape, [region])], size)
        assert set(rows) == set(rows_in(shape, region, cut))
        batch = RowsOfBatch({"x": leaf[rows]}, rows, size)
        expected = region_part(leaf.reshape(shape), region)
        assert torch.equal(batch.part("x", leaf[rows], shape, region), expected)


def test_stand_ins_are_whole() -> None:
    batch = RowsOfBatch({"x": torch.zeros(2, 3), "scale": torch.ones(1), "n": 4}, [1, 5], 6)
    given = WholeBatch(batch)
    whole = given.nest
    assert (whole["x"].shape, whole["x"].device.type, whole["n"]) == ((6, 3), "meta", 4)
    assert whole["scale"] is batch.batch["scale"]
    assert given.held[id(whole["x"])] is batch.batch["x"]


def test_leaves_without_as_many_rows_want_all() -> None:
    assert rows_of([((4, 2), (4, 2), [((0, 2), (0, 2))])], 6) == list(range(6))


def test_rows_that_were_not_loaded_are_named() -> None:
    batch = RowsOfBatch(torch.zeros(2, 3), [0, 1], 6)
    with pytest.raises(
        BatchError,
        match=r"batch leaf x is laid out differently in this program .* row 2 .*weft.Loader\(…, evaluation\)",
    ):
        batch.part("x", torch.zeros(2, 3), (6, 3), ((1, 2), (0, 3)))
