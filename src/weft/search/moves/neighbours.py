"""All moves from a strategy, those first that change most; and moves that are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from math import prod
from random import Random
from typing import Protocol, final

from weft.search.enumeration import Enumeration
from weft.search.moves.layouts import LayoutMoves
from weft.search.moves.others import memory_moves, time_moves
from weft.search.moves.runs import Run, run_moves, runs_of, weights_of
from weft.search.moves.staged import StageMoves
from weft.search.moves.strategy_move import StrategyMove
from weft.strategy.strategy import Strategy


class Moves(Protocol):
    """Moves from strategies."""

    def every(self, strategy: Strategy) -> list[StrategyMove]:
        """All single moves."""

    def drawn(self, random: Random, strategy: Strategy) -> StrategyMove:
        """A move, at random."""


@final
class Neighbours:
    """The moves from strategies of a step.

    Args:
        found: the search so far.
    """

    def __init__(self, found: Enumeration) -> None:
        self._facts, self._evaluator = found.facts, found.evaluator
        self._by_grid: dict[tuple[int, ...], LayoutMoves] = {}
        self._borders: dict[str, tuple[StrategyMove, ...]] = {}

    def families(self, strategy: Strategy) -> tuple[Sequence[StrategyMove], ...]:
        """All single moves, in families: those of tensors, of time and memory, of borders, of groups, of single calls.

        Moves after which the strategy is the same are among them.
        """
        facts, layouts = self._facts, self._layouts(strategy)
        # Micro-batches have statistics of their own: their number changes what a step computes.
        samples = 0 if facts.statistics else facts.samples
        rest = (
            *time_moves(strategy, facts.base, samples),
            *memory_moves(strategy, facts.base, facts.blocks),
        )
        borders = self._of_borders(strategy)
        return layouts.tensors, rest, borders, layouts.groupwise, layouts.single

    def every(self, strategy: Strategy) -> list[StrategyMove]:
        """All single moves."""
        return [change for family in self.families(strategy) for change in family]

    def drawn(self, random: Random, strategy: Strategy) -> StrategyMove:
        """A move: of one family like of the others, or along an edge."""
        along = self._layouts(strategy).drawn_along_edge(random) if random.random() < 0.25 else None
        families = [family for family in self.families(strategy) if family]
        return along or random.choice(random.choice(families))

    def _layouts(self, strategy: Strategy) -> LayoutMoves:
        grid = self._grid(strategy)
        if grid not in self._by_grid:
            facts = self._facts
            self._by_grid[grid] = LayoutMoves(facts.step, facts.blocks, grid, facts.base)
        return self._by_grid[grid]

    def _grid(self, strategy: Strategy) -> tuple[int, ...]:
        """The grid of each stage, in which layouts are."""
        stages = strategy.stages
        if not isinstance(stages, int) and stages:
            return tuple(stages[0].placement.shape)
        shape = self._evaluator.placement(strategy).shape
        count = stages if isinstance(stages, int) else 1
        return (shape[0] // count, *shape[1:])
