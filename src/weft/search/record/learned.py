"""The measures that a search made, of strategies and of points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, final

from weft.search.evaluation.measures import Answer, Longer, Measures
from weft.search.space.point import Point


@final
class Look(NamedTuple):
    """A look at a point by plans of few blocks.

    Attributes:
        answer: what the whole takes, about, or why it cannot be planned; None where the step is too small to look at.
        seconds: in which the whole would be planned, about.
    """

    answer: Answer | None
    seconds: float


@final
@dataclass(frozen=True)
class Learned:
    """The measures of strategies and points.

    Attributes:
        answers: of strategies that were planned, by `key_of`.
        longer: of others, that they take longer than was asked for, by that key too.
        points: of the space, as they were planned with what was fixed then.
        looks: at points without stages.
    """

    answers: Mapping[str, Answer] = field(default_factory=dict)
    longer: Mapping[str, Longer] = field(default_factory=dict)
    points: Mapping[Point, Answer] = field(default_factory=dict)
    looks: Mapping[Point, Look] = field(default_factory=dict)

    def was_slower(self, point: Point, seconds: float) -> bool:
        """True where a point took longer than that."""
        found = self.points.get(point)
        return isinstance(found, Measures) and found.seconds > seconds
