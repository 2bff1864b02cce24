"""Looks: what a strategy takes, on a line through plans of the step with 3 and with 4 of its repeated blocks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import final

from weft.planning.stored_step import StoredStep
from weft.search.evaluation.evaluator import Evaluator
from weft.search.evaluation.measures import Answer, Measures, along
from weft.search.steps.facts import MORE, StepFacts
from weft.strategy.strategy import Strategy
from weft.units import Bytes, Seconds

# Ranks that are not alike in a step without stages: of more, a plan takes long, and most exchange what others do not.
_MOST_CLASSES = 24


@final
@dataclass(slots=True)
class Probes:
    """Plans strategies of the small steps of a step, where it has some."""

    facts: StepFacts
    whole: Evaluator
    _small: tuple[Evaluator, ...] = field(default=(), repr=False)

    def of(self, strategy: Strategy) -> Answer | None:
        """The measures of a strategy without stages, about, or why it cannot be planned; None for a small step."""
        small = self.facts.small
        if small is None:
            return None
        found = []
        self.ahead(strategy)
        for evaluator in self._evaluators(small):
            answer = evaluator.of(strategy)
            if not isinstance(answer, Measures):
                return answer
            found.append(answer)
        return _far_along(found[0], found[1], self.facts.along)

    def seconds_of_plan(self, strategy: Strategy) -> float:
        """Seconds in which the whole step would be planned and simulated, by those of the small one; 0 if not known."""
        count = self.facts.blocks.count if self.facts.blocks is not None else 1
        return self._small[-1].took(strategy) * count / MORE if self._small else 0.0

    def ahead(self, strategy: Strategy) -> bool:
        """Have its small steps planned by other processes that have time; false where none has."""
        small = self.facts.small
        # The last first: this process begins with the first.
        return small is not None and all(
            each.ahead(strategy) for each in reversed(self._evaluators(small))
        )

    def _evaluators(self, small: tuple[StoredStep, StoredStep]) -> tuple[Evaluator, ...]:
        if not self._small:
            where = self.whole.machine, self.whole.ranks, _MOST_CLASSES
            one, two = small
            self._small = (
                Evaluator(one, *where, "few", self.whole.planners),
                Evaluator(two, *where, "more", self.whole.planners),
            )
        return self._small


def _far_along(one: Measures, two: Measures, times: float) -> Measures:
    """The measures as `along` says, of a step with more of all: neither seconds nor bytes are below those of the first.

    What is held most while several micro-batches run grows otherwise than what is held before and after (of few blocks
    an update of the embedding may take more than their activations): each on its own line.
    """
    found = along(one, two, times)
    parts = (
        first + times * (second - first) for first, second in zip(one.parts, two.parts, strict=True)
    )
    seconds, memory = max(found.seconds, one.seconds), max(found.memory, one.memory, *parts)
    return replace(found, seconds=Seconds(seconds), memory=Bytes(int(memory)))
