"""Pieces cover each tensor, once for each copy, and lie where its parts say."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.layout import Broadcast, Layout, Placement, Shares, Split
from weft.program.checkpoint.files import slices
from weft.program.checkpoint.program_state import SavedTensor, pieces_of, writers
from weft.runtime.memory.state import local_part
from weft.tensor.dispatch.interleaved import in_shares


@st.composite
def laid(draw: st.DrawFn) -> tuple[torch.Tensor, Layout, Shares | None]:
    """A tensor of numbers that differ, a layout, and perhaps shares."""
    grid = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    blocks = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    shares = Shares(0, tuple(blocks * each for each in lengths), blocks)
    stored = draw(st.sampled_from([None, shares]))
    rows = shares.size if stored else draw(st.integers(0, 9))
    shape = (rows, draw(st.integers(1, 5)))
    sbp = tuple(draw(st.sampled_from([Broadcast(), Split(0), Split(1)])) for _ in grid)
    ranks = tuple(range(torch.Size(grid).numel()))
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    return whole, Layout(Placement("cpu", grid, ranks), sbp), stored


@settings(max_examples=200, deadline=None, derandomize=True)
@given(laid())
def test_pieces_lie_where_parts_say(case: tuple[torch.Tensor, Layout, Shares | None]) -> None:
    whole, layout, shares = case
    for rank in layout.placement.ranks:
        part, seen = local_part(in_shares(whole, shares), layout, rank), 0
        for piece in pieces_of(tuple(whole.shape), layout, shares, rank):
            box = whole[slices(piece.whole)]
            assert torch.equal(part[slices(piece.local)], box)
            seen += box.numel()
        assert seen == part.numel()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(laid(), max_size=3))
def test_each_element_is_written_once(
    cases: list[tuple[torch.Tensor, Layout, Shares | None]],
) -> None:
    entries = [
        SavedTensor(f"t{number}", f"t{number}", tuple(whole.shape), "int64", layout, shares, {})
        for number, (whole, layout, shares) in enumerate(cases)
    ]
    plan = writers(entries)
    for entry in entries:
        seen = torch.zeros(entry.shape, dtype=torch.int64)
        for rank in entry.layout.placement.ranks:
            for piece in plan.get((entry.name, rank), ()):
                seen[slices(piece.whole)] += 1
        assert (seen == 1).all()


def test_ranks_share_the_writing_of_what_all_hold() -> None:
    layout = Layout(Placement("cpu", (4,), (0, 1, 2, 3)), (Broadcast(),))
    entries = [
        SavedTensor(f"t{number}", f"t{number}", (8,), "float32", layout, None, {})
        for number in range(8)
    ]
    written = [rank for _, rank in writers(entries)]
    assert sorted(written) == [0, 0, 1, 1, 2, 2, 3, 3]
