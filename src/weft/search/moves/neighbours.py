"""All moves from a strategy, those first that change most; and moves that are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Protocol, final

from weft.compiler.schedule.scheduled import in_flight
from weft.errors import InternalError, UserError
from weft.search.enumeration import Enumeration
from weft.search.moves.borders import border_moves, with_named_stages
from weft.search.moves.layouts import LayoutMoves
from weft.search.moves.others import in_flight_moves, memory_moves, time_moves
from weft.search.moves.strategy_move import StrategyMove
from weft.search.moves.zero_groups import ZeroMoves
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
        self._held: dict[str, tuple[int, ...]] = {}
        self._zero = ZeroMoves(self._facts.step.graph, self._facts.blocks)

    def families(self, strategy: Strategy) -> tuple[Sequence[StrategyMove], ...]:
        """All single moves, in families.

        Those of tensors, of time and memory, of ZeRO for groups of parameters, of stages, of groups, of single calls.

        Moves after which the strategy is the same are among them.
        """
        facts, layouts = self._facts, self._layouts(strategy)
        # Micro-batches have statistics of their own: their number changes what a step computes.
        samples = 0 if facts.statistics else facts.samples
        rest = (
            *time_moves(strategy, facts.base, samples),
            *memory_moves(strategy, facts.base, facts.blocks),
        )
        held = in_flight_moves(strategy, facts.base, self._in_flight(strategy))
        stages = (*self._of_borders(strategy), *held)
        zero = tuple(self._zero.moves(strategy, facts.base))
        # Where something is sharded, it may be more than there is need for.
        first = (zero, layouts.tensors, rest) if strategy.zero else (layouts.tensors, rest, zero)
        return *first, stages, layouts.groupwise, layouts.single

    def _in_flight(self, strategy: Strategy) -> tuple[int, ...]:
        """The micro-batches in flight of each stage, as given or as planned; none where there are no stages."""
        if self._facts.base.in_flight is not None or not strategy.stages:
            return ()
        if strategy.in_flight is not None:
            most = strategy.micro_batches
            return tuple(min(count, most) for count in strategy.in_flight)
        key = str(strategy)
        if key not in self._held:
            self._held[key] = self._planned_in_flight(strategy)
        return self._held[key]

    def _planned_in_flight(self, strategy: Strategy) -> tuple[int, ...]:
        try:
            compiled = self._evaluator.compiled(strategy)
        except (UserError, InternalError):
            return ()
        plans = compiled.schedule.plans
        return tuple(
            max((in_flight(p, stage) for p in plans if p.rank in placement.ranks), default=1)
            for stage, placement in enumerate(compiled.stages.placements)
        )

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

    def _of_borders(self, strategy: Strategy) -> tuple[StrategyMove, ...]:
        """Moves of borders; where stages are a number, of the strategy that names their modules."""
        stages = strategy.stages
        if not isinstance(stages, int):
            return tuple(border_moves(strategy)) if not self._facts.base.stages else ()
        key = str(strategy)
        if key not in self._borders:
            self._borders[key] = self._named_borders(strategy)
        return self._borders[key]

    def _named_borders(self, strategy: Strategy) -> tuple[StrategyMove, ...]:
        if self._facts.base.stages or self._facts.base.grid:
            return ()
        try:
            compiled = self._evaluator.compiled(strategy)
        except (UserError, InternalError):
            return ()
        named = with_named_stages(strategy, compiled, self._facts.blocks)
        if named is None:
            return ()
        return tuple(
            StrategyMove(each.name, partial(_named_and, named, each))
            for each in border_moves(named)
        )


def _named(named: Strategy, strategy: Strategy) -> Strategy:
    return replace(strategy, stages=named.stages, grid=())


def _named_and(named: Strategy, change: StrategyMove, strategy: Strategy) -> Strategy:
    """The change of a strategy once its stages have names."""
    return change.on(_named(named, strategy))
