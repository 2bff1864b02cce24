"""Moves of modules between the stages of a strategy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from weft.errors import StrategyError
from weft.strategy.parts import Stage
from weft.strategy.strategy import Strategy


@final
@dataclass(frozen=True)
class Candidate:
    """A strategy that moves change."""

    strategy: Strategy


@final
@dataclass(frozen=True)
class StageBorder:
    """A module goes to another stage. The strategy names it, by its whole path, in one of its stages."""

    module: str
    stage: int

    def on(self, candidate: Candidate) -> Candidate:
        """The candidate with the change.

        Raises:
            StrategyError: when the change does not fit the candidate.
        """
        stages = candidate.strategy.stages
        if isinstance(stages, int):
            raise StrategyError(
                f"StageBorder({self.module!r}, {self.stage}): the strategy has stages={stages}; name the modules of "
                "each stage with weft.Stage"
            )
        if not 0 <= self.stage < len(stages):
            raise StrategyError(
                f"StageBorder({self.module!r}, {self.stage}): the strategy has {len(stages)} stages; use one of them"
            )
        if not any(self.module in each.patterns for each in stages):
            raise StrategyError(
                f"StageBorder({self.module!r}, {self.stage}): no stage names just this module; use a name of its "
                "patterns"
            )
        moved = tuple(
            Stage(self._patterns(each, number == self.stage), each.placement)
            for number, each in enumerate(stages)
        )
        return Candidate(replace(candidate.strategy, stages=moved))

    def _patterns(self, stage: Stage, here: bool) -> list[str]:
        rest = [pattern for pattern in stage.patterns if pattern != self.module]
        return [*rest, self.module] if here else rest
