"""Estimates of pipelines, by the point without their stages that was looked at by lines through small steps.

That one has as many ranks for data and layers, and all blocks on each. Stages share its work; the first and the last
micro-batches find other stages idle, and all wait for the busiest.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import median
from typing import TypeAlias, final

from weft.compiler.schedule.gathers_first import AHEAD
from weft.planning.stored_step import StoredStep
from weft.search.bounds.floors import Floors
from weft.search.evaluation.evaluator import Evaluator
from weft.search.evaluation.measures import Answer, Measures
from weft.search.evaluation.planners import StepName
from weft.search.space.point import Point
from weft.search.space.points import Mask, Points
from weft.search.steps.facts import MORE, StepFacts
from weft.strategy.strategy import Strategy
from weft.units import Bytes, Seconds

# Times a pipeline's bubble that counts: other orders, and gradients of weights apart, fill a part of it (on paper all);
# parts in turn exchange more in it.
_BUBBLE = {"": 0.7, "zero_bubble": 0.7, "interleaved": 2.0}
# Times as long as without tensor parallelism that steps of pipelines take beside their small steps, which overlap sums
# of one micro-batch with work of others; and once more where gradients of weights are apart.
_TENSOR, _TENSOR_APART = 1.07, 1.1
# The part of a step by which each further part of a rank makes it longer, since it is one more exchange. More where
# layers are cut, since in each part other micro-batches have to fill the time of their sums.
_TURN, _TURN_CUT = 0.005, {"": 0.015, "interleaved": 0.035}
# What pipelines alike have in common: the schedule, whether layers are cut, blocks run again or wait, parameters are
# gathered for each use, and ranks have several parts.
_Traits: TypeAlias = tuple[str, bool, bool, bool, bool]


@final
@dataclass(eq=False)
class Pipelines:
    """Estimates of pipelines, whose bytes plans of others alike correct.

    Where no schedule is named, plans decide how many micro-batches fly: where blocks run again far more than there are
    stages.

    Attributes:
        floors: of points.
    """

    floors: Floors
    _larger: dict[_Traits, list[float]] = field(default_factory=dict, repr=False)

    def measures(self, point: Point, flat: Point, found: Measures) -> Measures:
        """The measures of a step in stages, about.

        Args:
            point: with stages.
            flat: the same without.
            found: of that one.
        """
        about = in_stages(point, flat, found, self.floors)
        states, larger = self.floors.states_of(point), self._larger.get(_traits_of(point), [1.0])
        memory = states + median(larger) * (about.memory - states)
        return replace(about, memory=Bytes(int(memory)))

    def learn(self, point: Point, flat: Point, found: Measures, planned: Measures) -> None:
        """Correct the bytes of others alike by those that a plan of a point took."""
        about, states = in_stages(point, flat, found, self.floors), self.floors.states_of(point)
        beside = max(planned.memory - states, 1.0) / max(about.memory - states, 1.0)
        self._larger.setdefault(_traits_of(point), []).append(beside)

    def is_planned(self, point: Point) -> bool:
        """True where some point alike was planned."""
        return _traits_of(point) in self._larger


def _traits_of(point: Point) -> _Traits:
    away = point.recompute + point.offload > 0
    return point.schedule, point.tensor > 1, away, point.zero == 3, point.turns > 1


def in_stages(point: Point, flat: Point, found: Measures, floors: Floors) -> Measures:
    """The measures of a step in stages, about, before any plan of a pipeline."""
    s, m = point.stages, point.micro_batches
    sums = float(floors.exchanges.sums(Points.one(flat))[0])
    reduced = min(max(found.exposed - sums, 0.0), found.seconds)
    uneven = float(floors.work.unevenness(Points.one(point))[0])
    # A micro-batch goes through all stages, one after the other: with few of them nothing fills the others' time.
    late = max((s - 1) / (m * point.turns) * _BUBBLE.get(point.schedule, 1.0), s / m - uneven)
    longer = _longer(point)
    seconds = longer * ((found.seconds - reduced) * (uneven + late) + reduced) / s
    exposed = longer * (reduced + sums) / s
    idle = longer * found.idle / s + seconds * (uneven - 1 + late) / (uneven + late)
    return Measures(
        Seconds(seconds), _memory(point, flat, found, floors), Seconds(exposed), Seconds(idle)
    )


def _memory(point: Point, flat: Point, found: Measures, floors: Floors) -> Bytes:
    """Bytes of the first group of ranks, which holds the most micro-batches."""
    s, m = point.stages, point.micro_batches
    kept, beside = _in_flight(flat, found, floors)
    flying = m if point.schedule == "gpipe" else min(_most_in_flight(s, point.turns), m)
    given = floors.facts.base.in_flight
    flying = min(max(given), m) if given is not None else flying
    whole = floors.states_of(point) + (beside + kept * flying) / s
    return Bytes(int(whole + _gathered_ahead(point, floors)))


def _gathered_ahead(point: Point, floors: Floors) -> float:
    """Bytes that ZeRO 3 gathers ahead more than without stages: each part's forward and backward by themselves."""
    facts = floors.facts
    if point.zero < 3 or facts.blocks is None:
        return 0.0
    stage = facts.parameters * facts.narrowed / _cut(point) / point.stages
    block = stage * point.stages / facts.blocks.count
    return min(AHEAD * (2 * point.turns - 1) * block, stage)


def _in_flight(flat: Point, found: Measures, floors: Floors) -> tuple[float, float]:
    """Bytes of a micro-batch's activations on all stages, and of what is held beside parameters and states.

    That is gradients, and parameters whole or in a narrower dtype.
    """
    facts = floors.facts
    held = facts.trained / (flat.data if flat.zero > 1 else 1)
    if flat.zero in (1, 2) or facts.narrowed < 1:
        held += facts.parameters * facts.narrowed / (flat.data if flat.zero == 3 else 1)
    more = max(found.memory - floors.states_of(flat), 0.0)
    beside = min(held / _cut(flat), more)
    return more - beside, beside


def _cut(point: Point) -> int:
    """In how many parts the layers of a stage are cut."""
    return point.tensor if point.layouts != "data" else 1


def holds_what_runs_again(points: Points) -> Mask:
    """True for pipelines that may put gradients of weights off: what runs again for a backward is there until these."""
    split = points.scheduled("", "zero_bubble")
    found: Mask = (points.stages > 1) & (points.turns == 1) & split
    return found


def _most_in_flight(stages: int, turns: int) -> float:
    """Micro-batches, of all parts together, that the first group of ranks holds at most."""
    return stages if turns == 1 else stages + (stages - 1) / turns


def _longer(point: Point) -> float:
    """Times as long in stages as small steps say: parts in turn exchange more."""
    apart = _TENSOR_APART if point.schedule == "zero_bubble" else 1.0
    if point.tensor == 1:
        return 1 + _TURN * (point.turns - 1)
    return _TENSOR * apart * (1 + _TURN_CUT.get(point.schedule, _TURN) * (point.turns - 1))


# Ranks that are not alike in a step without stages: of more, a plan takes long, and most exchange what others do not.
_MOST_CLASSES = 24
_NAMES: tuple[StepName, StepName] = ("few", "more")


@final
@dataclass(eq=False)
class Lines:
    """Estimates of strategies for a step by two small ones.

    Attributes:
        facts: of the step.
        whole: plans strategies of the whole step on the machine.
    """

    facts: StepFacts
    whole: Evaluator
    _small: list[Evaluator] = field(default_factory=list, repr=False)

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

    def _evaluators(self, small: tuple[StoredStep, StoredStep]) -> list[Evaluator]:
        if not self._small:
            machine, ranks, planners = self.whole.machine, self.whole.ranks, self.whole.planners
            self._small.extend(
                Evaluator(step, machine, ranks, _MOST_CLASSES, name, planners)
                for step, name in zip(small, _NAMES, strict=True)
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


def along(one: Measures, two: Measures, times: float) -> Measures:
    """The measures as far from one as `times` the way to the other."""
    return Measures(
        Seconds(one.seconds + times * (two.seconds - one.seconds)),
        Bytes(int(one.memory + times * (two.memory - one.memory))),
        Seconds(max(one.exposed + times * (two.exposed - one.exposed), 0.0)),
        Seconds(max(one.idle + times * (two.idle - one.idle), 0.0)),
    )
