"""All moves from a strategy, those first that change most; and moves that are drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from math import prod
from random import Random
from typing import Protocol, final

from weft.compiler.schedule.scheduled import in_flight
from weft.compiler.stages.stages import stage_placements
from weft.search.moves.layouts import LayoutMoves
from weft.search.moves.places.staged import StageMoves
from weft.search.moves.sequences import chained
from weft.search.moves.strategy_move import StrategyMove
from weft.search.moves.time_and_memory import in_flight_moves, memory_moves, time_moves
from weft.search.moves.zero_groups import ZeroMoves
from weft.search.state import SearchState
from weft.strategy.strategy import Strategy

# The part of a step that ranks wait, from which on places come first; chosen by hand.
_WORTH = 0.01
# The part of drawn moves that sign both ends of an edge: two single moves seldom meet on what goes along it.
_ALONG_EDGE = 0.25


class Moves(Protocol):
    """Moves from strategies."""

    def every(self, strategy: Strategy) -> Sequence[StrategyMove]:
        """All single moves."""

    def cuts(self, strategy: Strategy) -> Iterator[StrategyMove]:
        """Those that cut a strategy without stages into some."""

    def drawn(self, random: Random, strategy: Strategy) -> StrategyMove:
        """A move, at random."""


@final
class Neighbours:
    """The moves from strategies of a step.

    Args:
        state: of the search.
    """

    def __init__(self, state: SearchState) -> None:
        self._state, self._facts, self._evaluator = state, state.facts, state.evaluator
        self._by_grid: dict[tuple[int, ...], LayoutMoves] = {}
        self._scheduled: dict[str, tuple[int, ...]] = {}
        self._zero = ZeroMoves(self._facts.step.graph, self._facts.blocks)
        self._stages = StageMoves(state.facts, state.evaluator)

    def families(self, strategy: Strategy) -> tuple[Sequence[StrategyMove], ...]:
        """All single moves, in families.

        Those of tensors, of time and memory, of ZeRO for groups of parameters, of stages, of places and runs, of
        groups, of single calls. Moves after which the strategy is the same are among them.
        """
        layouts = self._layouts(strategy)
        places = tuple(each.move for each in self._stages.places(strategy))
        runs = tuple(move for _, move in self._runs(strategy))
        return (
            layouts.tensors,
            self._rest(strategy),
            tuple(self._zero.moves(strategy, self._facts.base)),
            (*self._stages.borders(strategy), *self._in_flight_moves(strategy)),
            (*places, *runs),
            layouts.groupwise,
            layouts.single,
        )

    def every(self, strategy: Strategy) -> Sequence[StrategyMove]:
        """All single moves; where ranks wait, places and runs that save bytes stand between those of tensors."""
        tensors, rest, zero, stages, _, groupwise, single = self.families(strategy)
        first, last = self._along(strategy)
        pairs = zip_longest(tensors, first)
        laid = [each for pair in pairs for each in pair if each is not None]
        # Where something is sharded, it may be more than there is need for.
        begin = (*zero, *laid, *rest) if strategy.zero else (*laid, *rest, *zero)
        return chained(((*begin, *stages), groupwise, last, single))

    def cuts(self, strategy: Strategy) -> Iterator[StrategyMove]:
        """Those that cut a strategy without stages into some: of places and runs, of time, of borders."""
        first, last = self._along(strategy)
        stages = self._stages.borders(strategy)
        return (
            move
            for move in chain(first, self._rest(strategy), stages, last)
            if move.on(strategy).stages
        )

    def _along(self, strategy: Strategy) -> tuple[list[StrategyMove], list[StrategyMove]]:
        """Moves of places and runs: those that save bytes, where ranks wait, and all others."""
        along = [(each.worth, each.move) for each in self._stages.places(strategy)]
        along += [(float(saved), move) for saved, move in self._runs(strategy)]
        along.sort(key=lambda each: -each[0])
        count = sum(worth > 0 for worth, _ in along) if self._waits() else 0
        moves = [move for _, move in along]
        return moves[:count], moves[count:]

    def drawn(self, random: Random, strategy: Strategy) -> StrategyMove:
        """A move: of one family like of the others, or along an edge."""
        draws = random.random() < _ALONG_EDGE
        along = self._layouts(strategy).drawn_along_edge(random) if draws else None
        families = [family for family in self.families(strategy) if family]
        return along or random.choice(random.choice(families))

    def _rest(self, strategy: Strategy) -> tuple[StrategyMove, ...]:
        """Moves of time and memory."""
        facts = self._facts
        # Micro-batches have statistics of their own: their number changes what a step computes.
        samples = 0 if facts.statistics else facts.samples
        return (
            *time_moves(strategy, facts.base, samples),
            *memory_moves(strategy, facts.base, facts.blocks),
        )

    def _in_flight_moves(self, strategy: Strategy) -> Sequence[StrategyMove]:
        """Moves of the micro-batches in flight of one stage."""
        return tuple(in_flight_moves(strategy, self._facts.base, self._in_flight(strategy)))

    def _in_flight(self, strategy: Strategy) -> tuple[int, ...]:
        """The micro-batches in flight of each stage, as given or as planned; none where there are no stages."""
        if self._facts.base.in_flight is not None or not strategy.stages:
            return ()
        if strategy.in_flight is not None:
            most = strategy.micro_batches
            return tuple(min(count, most) for count in strategy.in_flight)
        key = str(strategy)
        if key not in self._scheduled:
            self._scheduled[key] = self._planned_in_flight(strategy)
        return self._scheduled[key]

    def _planned_in_flight(self, strategy: Strategy) -> tuple[int, ...]:
        compiled = self._evaluator.compiled_or_none(strategy)
        if compiled is None:
            return ()
        plans = compiled.schedule.plans
        return tuple(
            max((in_flight(p, stage) for p in plans if p.rank in placement.ranks), default=1)
            for stage, placement in enumerate(compiled.stages.placements)
        )

    def _runs(self, strategy: Strategy) -> list[tuple[int, StrategyMove]]:
        """Moves of runs of parameters, with the bytes that each run should save."""
        grid, fixed = self._grid(strategy), self._facts.base.parameters
        runs = self._stages.runs if prod(grid) > 1 else ()
        return [(run.saved, move) for run in runs for move in run.moves(grid, fixed)]

    def _waits(self) -> bool:
        """True where ranks of the best wait for a part of the step that is worth moves."""
        best = self._state.best
        return best is not None and best[2].exposed + best[2].idle > _WORTH * best[2].seconds

    def _layouts(self, strategy: Strategy) -> LayoutMoves:
        grid = self._grid(strategy)
        if grid not in self._by_grid:
            facts = self._facts
            self._by_grid[grid] = LayoutMoves(facts.step, facts.blocks, grid, facts.base)
        return self._by_grid[grid]

    def _grid(self, strategy: Strategy) -> tuple[int, ...]:
        """The grid in which layouts are: that of the largest stage."""
        stages = strategy.stages if isinstance(strategy.stages, int) else tuple(strategy.stages)
        placements = stage_placements(stages, self._evaluator.placement(strategy))
        return tuple(max((each.shape for each in placements), key=prod))
