"""Which nested lists of ranks are grids, and how large one may be."""

from __future__ import annotations

from typing import Any

import pytest

from weft.errors import LayoutError
from weft.layout.placement import MOST_AXES, MOST_RANKS, placement


def nested(axes: int) -> Any:
    """One rank in so many lists."""
    found: Any = 0
    for _ in range(axes):
        found = [found]
    return found


@pytest.mark.parametrize("axes", range(1, MOST_AXES + 1))
def test_every_number_of_axes_up_to_the_most(axes: int) -> None:
    assert placement("cpu", nested(axes)).shape == (1,) * axes


def test_no_more_axes_than_the_most() -> None:
    with pytest.raises(LayoutError, match=f"{MOST_AXES} axes"):
        placement("cpu", nested(MOST_AXES + 1))


def test_no_more_ranks_than_the_most() -> None:
    assert placement("cpu", range(MOST_RANKS)).shape == (MOST_RANKS,)
    with pytest.raises(LayoutError, match=f"at most {MOST_RANKS} ranks"):
        placement("cpu", range(MOST_RANKS + 1))


@pytest.mark.parametrize("ranks", [[], [[]], [[0, 1], [2]], [0, [1]], [True], ["0"], 3, None])
def test_what_is_no_grid_is_refused(ranks: Any) -> None:
    with pytest.raises(LayoutError, match="full grid of ranks"):
        placement("cpu", ranks)


@pytest.mark.parametrize("ranks", [[3, 1], [[0, 1, 2], [5, 4, 3]], [[[0], [1]], [[2], [3]]]])
def test_ranks_keep_their_order(ranks: Any) -> None:
    flat: Any = ranks
    while isinstance(flat[0], list):
        flat = [each for part in flat for each in part]
    assert placement("cpu", ranks).ranks == tuple(flat)
