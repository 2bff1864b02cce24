"""Messages between the search and its planners, pickled, over a socket that they alone have."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias, final

from weft.planning.machine import Machine
from weft.planning.stored_step import StoredStep
from weft.search.evaluation.measures import Answer, Longer
from weft.strategy.strategy import Strategy
from weft.units import Seconds

# Which of the steps of a search: the whole one, or one with few of its blocks.
StepName: TypeAlias = Literal["whole", "few", "more"]


@final
class Setup(NamedTuple):
    """A step to plan for, as `Evaluator` takes it."""

    name: StepName
    step: StoredStep
    machine: Machine
    ranks: tuple[int, ...]
    most_classes: int | None


@final
class Question(NamedTuple):
    """A strategy to plan, and the seconds that a step may take to be simulated whole."""

    name: StepName
    strategy: Strategy
    most: Seconds


@final
class PlannedAhead(NamedTuple):
    """The measures of a strategy that was planned ahead.

    Attributes:
        answer: as `Evaluator.within` gives it.
        took: seconds of planning.
    """

    answer: Answer | Longer
    took: float
