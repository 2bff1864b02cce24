"""The strategies that chains begin at: the best, the cheapest layouts in its grid, those by hand, and a random one."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from weft.search.moves.neighbours import Moves
from weft.search.space.fixed import fits, hand_only
from weft.search.space.point import Point
from weft.search.state import SearchState
from weft.strategy.strategy import Strategy

# Random moves away from the best; chosen by hand, so that a descent does not lead straight back.
FAR = 6


def starts(state: SearchState, neighbours: Moves, random: Random) -> Iterator[tuple[str, Strategy]]:
    """A strategy for each chain of a round, and its name: those that keep what is fixed.

    Args:
        state: of the search.
        neighbours: the moves.
        random: draws those away from the best.
    """
    assert state.best is not None
    name, strategy, _ = state.best
    yield name, strategy
    additive = state.additive()
    if additive is not None:
        yield name, additive.cheapest
    yield from _by_hand(state)
    name, strategy, _ = state.best
    for _ in range(FAR):
        strategy = neighbours.drawn(random, strategy).on(strategy)
    yield name, strategy


def _by_hand(state: SearchState) -> Iterator[tuple[str, Strategy]]:
    """On all ranks: data parallel, layers split, fully sharded."""
    facts, ranks = state.facts, len(state.evaluator.ranks)
    if hand_only(facts.base) or ranks == 1:
        return
    points = [Point(ranks)] if facts.samples >= ranks else []
    if facts.linears.rows:
        points.append(Point(1, ranks, layouts="columns"))
    points += [Point(ranks, zero=3)] if points and points[0].data == ranks else []
    for point in points:
        if fits(point, facts.base):
            yield str(point), state.strategy(point)
