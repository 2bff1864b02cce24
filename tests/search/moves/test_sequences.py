"""Moves that are made when they are asked for."""

from __future__ import annotations

from functools import partial

import pytest

from weft.search.moves.sequences import LazyMoves, StrategyMove, chain_moves
from weft.strategy.strategy import Strategy


def named(made: list[str], letter: str, number: int) -> StrategyMove:
    """A move that notes that it was made."""
    made.append(f"{letter}{number}")
    return StrategyMove(f"{letter}{number}", lambda strategy: strategy)


def test_moves_are_made_when_they_are_asked_for() -> None:
    made: list[str] = []
    parts = [
        LazyMoves(count, partial(named, made, letter))
        for letter, count in zip("abc", (2, 0, 3), strict=True)
    ]
    moves = chain_moves((*parts, (StrategyMove("last", lambda strategy: strategy),)))
    assert len(moves) == 6
    assert not made
    assert moves[3].name == "c1"
    assert made == ["c1"]
    assert [each.name for each in moves] == ["a0", "a1", "c0", "c1", "c2", "last"]
    assert moves[-1].name == "last"
    assert moves[-1].on(Strategy()) == Strategy()
    with pytest.raises(IndexError):
        moves[6]
    assert not len(chain_moves(()))
