"""Moves of stages from any strategy: their modules are named first, since a number of stages has none."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import final

from weft.cached import cached_property
from weft.hardware.seconds_model import seconds_model
from weft.search.evaluation.evaluator import Evaluator
from weft.search.moves.borders import border_moves, with_named_stages
from weft.search.moves.places.placements import PlacementMove, PlacementMoves
from weft.search.moves.places.runs import WeightRun, runs_of, weights_of
from weft.search.moves.places.shares import share_moves
from weft.search.moves.strategy_move import StrategyMove
from weft.search.steps.facts import StepFacts
from weft.search.steps.parts import Parts, parts_of
from weft.strategy.parts import Stage
from weft.strategy.strategy import Strategy

# Micro-batches with which stages on different ranks work at the same time, where the strategy has one.
_CUT = 4


@final
@dataclass(frozen=True, eq=False)
class StageMoves:
    """The moves of stages of one step.

    Attributes:
        facts: of the step.
        evaluator: which plans it.
    """

    facts: StepFacts
    evaluator: Evaluator
    _named: dict[str, Strategy | None] = field(default_factory=dict, repr=False)
    _borders: dict[str, tuple[StrategyMove, ...]] = field(default_factory=dict, repr=False)
    _placed: dict[object, tuple[PlacementMove, ...]] = field(default_factory=dict, repr=False)

    @cached_property
    def parts(self) -> Parts:
        """The parts of the model, with what they cost on the machine."""
        facts = self.facts
        model = seconds_model(facts.machine.planned, facts.ranks)
        return parts_of(facts.step.graph, facts.blocks, model)

    @cached_property
    def runs(self) -> tuple[WeightRun, ...]:
        """Weights alike along the model, those first that save most where they are split."""
        parts = self.parts
        weights = weights_of(self.facts.step, parts.calls, tuple(parts.units))
        return runs_of(weights, self.facts.base.parameters)

    def borders(self, strategy: Strategy) -> tuple[StrategyMove, ...]:
        """Modules, and ranks, that go to another stage; none where it has no stages."""
        if strategy.stages in ((), 1):
            return ()
        key = str(strategy)
        if key not in self._borders:
            named = self._with_names(strategy)
            found = () if named is None else (*border_moves(named), *share_moves(named))
            self._borders[key] = tuple(
                StrategyMove(each.name, partial(_named_and, named, each)) for each in found if named
            )
        return self._borders[key]

    def places(self, strategy: Strategy) -> tuple[PlacementMove, ...]:
        """Parts on ranks of their own, and stages that become two; those of the most worth first."""
        if len(self.facts.ranks) == 1:
            return ()
        named = self._with_names(strategy)
        if named is None or isinstance(named.stages, int):
            return ()
        stages, micro_batches = tuple(named.stages), self._micro_batches(strategy)
        key = str(stages), micro_batches
        if key not in self._placed:
            self._placed[key] = tuple(PlacementMoves(self.parts, stages, micro_batches).best())
        return self._placed[key]

    def _micro_batches(self, strategy: Strategy) -> tuple[int, ...]:
        own, facts = strategy.micro_batches, self.facts
        free = facts.base.micro_batches == 1 and not facts.statistics
        cut = own == 1 and free and facts.samples > 0 and facts.samples % _CUT == 0
        return (own, _CUT) if cut else (own,)

    def _with_names(self, strategy: Strategy) -> Strategy | None:
        """The strategy with the modules and ranks of each stage; None where stages are fixed, or it has no plan."""
        base, stages = self.facts.base, strategy.stages
        if base.stages or base.grid:
            return None
        if not isinstance(stages, int) and stages:
            return strategy
        if stages in ((), 1):
            whole = Stage(tuple(self.parts.units), self.evaluator.placement(strategy))
            return replace(strategy, stages=(whole,), grid=())
        key = str(strategy)
        if key not in self._named:
            self._named[key] = self._named_anew(strategy)
        return self._named[key]

    def _named_anew(self, strategy: Strategy) -> Strategy | None:
        compiled = self.evaluator.compiled_or_none(strategy)
        if compiled is None:
            return None
        return with_named_stages(strategy, compiled, self.facts.blocks)


def _named_and(named: Strategy, change: StrategyMove, strategy: Strategy) -> Strategy:
    """The change of a strategy once its stages have names."""
    return change.on(replace(strategy, stages=named.stages, grid=()))
