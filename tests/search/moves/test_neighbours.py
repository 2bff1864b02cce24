"""All moves from a strategy, and those of them that cut it into stages."""

from __future__ import annotations

from dataclasses import replace

from search.jobs import begun, layers
from weft.search.moves.neighbours import Neighbours
from weft.strategy.strategy import data_parallel


def test_cuts_are_the_moves_that_make_stages() -> None:
    """The same as among all moves, without going through those of each call."""
    found = begun(layers(), "flexflow-k80x2")
    strategy = replace(data_parallel(), grid=(2,))
    found.log.plan("data 2", strategy)
    moves = Neighbours(found)
    cuts = [each.name for each in moves.cuts(strategy)]
    assert cuts
    assert set(cuts) == {each.name for each in moves.every(strategy) if each.on(strategy).stages}
