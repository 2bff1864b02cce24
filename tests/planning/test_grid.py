"""Grids of ranks: what is asked for, and what is taken without."""

from __future__ import annotations

import pytest

import weft
from weft.errors import UserError
from weft.planning.machine import parse_grid, placement_on

DATA = weft.data_parallel()
PARTS = weft.Strategy(
    stages=[
        weft.Stage(["a"], weft.placement("cuda", [[0, 1], [2, 3]])),
        weft.Stage(["b"], weft.placement("cuda", [5, 4])),
    ]
)


def test_a_grid_is_read() -> None:
    assert parse_grid("8") == (8,)
    assert parse_grid("16x8x128") == (16, 8, 128)


@pytest.mark.parametrize("text", ["", "0", "8x", "x8", "8x0", "-8", "8,8", "2x1e3", "٣"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--grid must be .* such as 8 or 16x8x128, got"):
        parse_grid(text)


def test_grids_are_bounded() -> None:
    with pytest.raises(UserError, match="weft plans 1048576 at most"):
        parse_grid("999999999x999999999")


def test_without_a_grid_all_devices_stand_in_a_line() -> None:
    assert placement_on("cpu", 4, DATA) == weft.placement("cpu", [0, 1, 2, 3])


def test_a_number_of_stages_makes_a_first_axis() -> None:
    strategy = weft.Strategy(stages=2)
    assert placement_on("cuda", 6, strategy) == weft.placement("cuda", [[0, 1, 2], [3, 4, 5]])
    with pytest.raises(UserError, match="4 stages do not divide 6 devices; .*--grid 4x1"):
        placement_on("cuda", 6, weft.Strategy(stages=4))


def test_a_grid_takes_the_first_devices() -> None:
    assert placement_on("cpu", 9, DATA, (2, 2)) == weft.placement("cpu", [[0, 1], [2, 3]])
    with pytest.raises(UserError, match="the grid 2x5 has 10 ranks, the topology has 9 devices"):
        placement_on("cpu", 9, DATA, (2, 5))


def test_stages_that_name_their_ranks_say_the_placement() -> None:
    assert placement_on("cuda", 8, PARTS) == weft.placement("cuda", [0, 1, 2, 3, 4, 5])
    with pytest.raises(UserError, match="name rank 5, the topology has the 5 devices 0 to 4"):
        placement_on("cuda", 5, PARTS)
    with pytest.raises(UserError, match="so --grid must be left out, got 2x3"):
        placement_on("cuda", 8, PARTS, (2, 3))
    with pytest.raises(UserError, match="stage 0 .* runs on 'cuda', the topology's devices are"):
        placement_on("cpu", 8, PARTS)


def test_more_stages_than_devices_are_told_apart() -> None:
    with pytest.raises(UserError, match="60000 stages .* give fewer stages"):
        placement_on("cpu", 8, weft.Strategy(stages=60_000))
