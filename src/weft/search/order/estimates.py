"""Estimates of points: first by floors, then by lines through small steps, which correct those of points alike.

A pipeline is estimated by the point without its stages: with as many ranks for data and layers, and all blocks on
each. Its stages share that step's work; the first and the last micro-batches find other stages idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median
from typing import TypeAlias, final

from weft.search.bounds.floors import Floors
from weft.search.evaluation.measures import Measures
from weft.search.order.lines import Lines
from weft.search.record.learned import Learned, Look
from weft.search.space import Point
from weft.strategy.strategy import Strategy
from weft.units import Bytes, Seconds

_Key: TypeAlias = tuple[object, ...]
# The part of a pipeline's bubble that is left where other orders fill it. Gradients of weights fill it on paper; steps
# of deep pipelines were simulated to be longer with them apart, not shorter.
_BUBBLE = {"": 0.7}
# Times as long as others that plans take in which gradients of weights are acts of their own.
_SPLIT = 1.4
# A point that has no room comes behind all that have, those first that have almost.
_NO_ROOM = 100.0


@final
@dataclass(frozen=True)
class Estimates:
    """Estimates of points, better with each that is looked at.

    Attributes:
        floors: of points.
        lines: through small steps.
        strategy: that a point stands for.
        learned: of an earlier search.
    """

    floors: Floors
    lines: Lines
    strategy: Callable[[Point], Strategy]
    learned: Learned = Learned()  # noqa: RUF009 (frozen)
    _looks: dict[Point, Look] = field(default_factory=dict, repr=False)
    _factors: dict[_Key, list[float]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._looks.update(self.learned.looks)
        seen = {point: look.answer for point, look in self.learned.looks.items()}
        for point, answer in (*seen.items(), *self.learned.points.items()):
            if isinstance(answer, Measures):
                self.learn(point, answer.seconds)

    @property
    def looks(self) -> Mapping[Point, Look]:
        """The looks so far, at points without stages."""
        return self._looks

    def rough(self, point: Point) -> Seconds:
        """Seconds of a step by floors, times what points alike took longer than theirs."""
        return Seconds(self.floors.estimate(point) * self._factor(point))

    def refined(self, point: Point) -> Measures | None:
        """The measures of a step, about: of an earlier search, or by small steps.

        None where it is too small for these, or cannot be planned.
        """
        before = self.learned.points.get(point)
        if isinstance(before, Measures):
            return before
        flat = _flat(point)
        if flat not in self._looks:
            self._looks[flat] = self._look(flat)
        found = self._looks[flat].answer
        if not isinstance(found, Measures):
            return None
        return found if point.stages == 1 else self._in_stages(point, flat, found)

    def ahead(self, point: Point) -> bool:
        """Have a point's small steps planned by other processes that have time; false where none has."""
        return self.looked_at(point) or self.lines.ahead(self.strategy(_flat(point)))

    def _look(self, flat: Point) -> Look:
        strategy = self.strategy(flat)
        answer = self.lines.of(strategy)
        if isinstance(answer, Measures):
            self.learn(flat, answer.seconds)
        return Look(answer, self.lines.seconds_of_plan(strategy))

    def seconds(self, point: Point) -> Seconds:
        """Seconds by which points are ordered once they were looked at: of those without room many more."""
        found = self.refined(point)
        if found is None:
            return self.rough(point) if self._looks[_flat(point)].answer is None else Seconds(inf)
        over = found.memory / (self.floors.limit or inf)
        return Seconds(found.seconds * (_NO_ROOM * over if over > 1 else 1.0))

    def has_room(self, point: Point) -> bool:
        """True for a point that was looked at and should fit."""
        found = self.refined(point)
        return found is not None and found.memory <= (self.floors.limit or inf)

    def looked_at(self, point: Point) -> bool:
        """True where a point's small steps were planned, or the point itself in an earlier search."""
        return _flat(point) in self._looks or point in self.learned.points

    def seconds_of_plan(self, point: Point) -> float:
        """Seconds in which a point would be planned and simulated, about; 0 where it was not looked at."""
        times = _SPLIT if point.schedule == "zero_bubble" else 1.0
        look = self._looks.get(_flat(point))
        return times * look.seconds if look is not None else 0.0

    def _in_stages(self, point: Point, flat: Point, found: Measures) -> Measures:
        s, m = point.stages, point.micro_batches
        sums = self.floors.exchanges.sums(flat)
        reduced = min(max(found.exposed - sums, 0.0), found.seconds)
        late = (s - 1) / m * _BUBBLE.get(point.schedule, 1.0)
        seconds = ((found.seconds - reduced) * (1 + late) + reduced) / s
        kept, beside = self._in_flight(flat, found)
        flying = m if point.schedule == "gpipe" else min(s, m)
        memory = self.floors.states(point) + (beside + kept * flying) / s
        waits = Seconds(found.idle + seconds * late / (1 + late))
        return Measures(
            Seconds(seconds), Bytes(int(memory)), Seconds(reduced / s + sums / s), waits
        )

    def _in_flight(self, flat: Point, found: Measures) -> tuple[float, float]:
        """Bytes of a micro-batch's activations on all stages, and of what is held beside parameters and states.

        That is gradients, and parameters whole or in a narrower dtype.
        """
        facts = self.floors.facts
        cut = flat.tensor if flat.layouts != "data" else 1
        held = facts.parameters / (flat.data if flat.zero > 1 else 1)
        if flat.zero in (1, 2) or facts.narrowed < 1:
            held += facts.parameters * facts.narrowed
        more = max(found.memory - self.floors.states(flat), 0.0)
        beside = min(held / cut, more)
        return more - beside, beside

    def learn(self, point: Point, seconds: Seconds) -> None:
        """Correct the rough estimates of points alike by what this one took."""
        ratio = seconds / max(self.floors.estimate(point), 1e-30)
        for key in _keys(point, self.floors.facts.samples):
            self._factors.setdefault(key, []).append(ratio)

    def _factor(self, point: Point) -> float:
        for key in _keys(point, self.floors.facts.samples):
            if key in self._factors:
                return median(self._factors[key])
        return 1.0


def _flat(point: Point) -> Point:
    """The point without its stages."""
    return replace(point, stages=1, schedule="")


def _keys(point: Point, samples: int) -> Iterator[_Key]:
    """Names of points alike, the most alike first."""
    each = samples // (point.data * point.micro_batches)
    layouts = (point.layouts, point.tensor, point.outer, point.stages > 1)
    yield (*layouts, each, point.recompute, point.zero == 3)
    yield (*layouts, each, point.recompute)
    yield layouts
    yield (point.layouts, point.stages > 1)
    yield ()
