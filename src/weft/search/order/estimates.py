"""Estimates of points: first rough ones, then by lines through small steps, which correct those of points alike.

A pipeline is estimated by the point without its stages (`in_stages`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import final

import numpy as np

from weft.cached import cached_property
from weft.search.bounds.floors import Floors
from weft.search.evaluation.measures import Answer, Measures, Refused
from weft.search.order.in_stages import Lines, Pipelines, along, holds_what_runs_again
from weft.search.order.rough import (
    BY_SMALL_STEPS,
    IN_STAGES,
    Alike,
    Rough,
    RoughEstimates,
    RoughParts,
    columns_of,
)
from weft.search.record.record import Learned, Look
from weft.search.space.point import Point
from weft.search.space.points import Floats, Points
from weft.search.steps.facts import FEW, MORE
from weft.strategy.strategy import Strategy
from weft.units import Seconds

# Times as long as their small steps without stages say that plans of pipelines take, by the schedule: equal stages are
# planned once; one that is computed ("") is found by simulations. Of 16 that were planned, 0.7 to 4.0 times as long.
_IN_STAGES = {"": 1.6, "gpipe": 0.95, "1f1b": 0.95, "interleaved": 1.1, "zero_bubble": 1.0}
# The part of the limit that a point with as few blocks recomputed as fit may take by estimate.
_ROOM_WITH_FEW = 0.97
# A point that has no room comes behind all that have, those first that have almost; chosen by hand, far above what
# points differ by.
_NO_ROOM = 100.0
# Times as many bytes as estimated that pipelines may take, by the schedule; and once one alike was planned. Of
# 50 that were planned those with a stage a rank and a named schedule took 1.02 at most, a computed one ("") mostly 1.1.
_LARGER = {"": 1.1, "gpipe": 1.03, "1f1b": 1.03, "interleaved": 1.1, "zero_bubble": 1.05}
_LARGER_THAN_ALIKE = 1.03


@final
@dataclass(eq=False)
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
    _alike: Alike = field(default_factory=Alike, repr=False)

    def __post_init__(self) -> None:
        self._looks.update(self.learned.looks)
        for flat, look in self.learned.looks.items():
            self._learn_look(flat, look.answer)
        for point, answer in self.learned.points.items():
            if isinstance(answer, Measures):
                self.learn(point, answer)

    @property
    def known(self) -> int:
        """The number of points of which something is known that estimates of others hang on."""
        return self._alike.known

    @property
    def looks(self) -> Mapping[Point, Look]:
        """The looks so far, at points without stages."""
        return self._looks

    def rough(self, points: Points) -> Floats:
        """Seconds of steps by rough estimates, times what points alike took longer; more where they lack room."""
        return self.rough_from(self.rough_parts(points))

    def rough_parts(self, points: Points) -> RoughParts:
        """All that is said of points before any plan, which does not change in a search."""
        return self._rough.parts(points)

    @cached_property
    def _rough(self) -> RoughEstimates:
        return RoughEstimates(self.floors)

    def rough_from(self, known: RoughParts) -> Floats:
        """Seconds as `rough` gives them, from what is said before any plan.

        Points of which all blocks run again, or wait, stand for those with as few of them as give room.
        """
        seconds, memory = self._corrected(known.points)
        crowding = self._rough.crowding(memory)
        if known.every.any():
            every = known.every
            seconds[every] = self._with_fewer(seconds[every], memory[every], known.kept)
        return seconds * crowding

    def _corrected(self, rough: Rough) -> tuple[Floats, Floats]:
        """Seconds, and bytes beside what devices reserve, as what points alike took says."""
        ratios = self._alike.ratios(rough.columns)
        return rough.seconds * ratios.seconds, rough.memory * ratios.memory

    def _with_fewer(self, seconds: Floats, memory: Floats, kept: Rough) -> Floats:
        """Between none of the blocks and all of them, as far as room asks for; all where none need."""
        none, most = self._corrected(kept)
        part = np.clip((most - self._room) / np.maximum(most - memory, 1.0), 0.0, 1.0)
        return np.where((part > 0) & (part < 1), none + part * (seconds - none), seconds)

    def quickest(self, points: Points) -> tuple[Point, Seconds] | None:
        """The point that should be the quickest, if memory were no matter, and its seconds; None without any."""
        seconds, _ = self._corrected(self._rough.of(points))
        if not len(seconds):
            return None
        first = int(seconds.argmin())
        return points.point(first), Seconds(float(seconds[first]))

    @property
    def _room(self) -> float:
        """Bytes beside what a device reserves that points may take by estimate of which few blocks run again."""
        limit = self.floors.limit
        return inf if limit is None else _ROOM_WITH_FEW * (limit - self.floors.reserve)

    @cached_property
    def _pipelines(self) -> Pipelines:
        return Pipelines(self.floors)

    def rough_memory(self, known: RoughParts) -> Floats:
        """Bytes of points beside what devices reserve, by rough estimate as what points alike took says it."""
        return self._corrected(known.points)[1]

    def rough_of(self, point: Point) -> Seconds:
        """Seconds of a step, as `rough` says them."""
        return Seconds(float(self.rough(Points.one(point))[0]))

    def refined(self, point: Point) -> Measures | None:
        """The measures of a step, about: of an earlier search, or by small steps.

        None where it is too small for these, or cannot be planned.
        """
        before = self.learned.points.get(point)
        if isinstance(before, Measures):
            return before
        if self._is_partial(point):
            return self._in_part(point)
        flat = _flat(point)
        if flat not in self._looks:
            self._looks[flat] = self._look(flat)
        found = self._looks[flat].answer
        if not isinstance(found, Measures):
            return None
        return found if point.stages == 1 else self._staged(point, flat, found)

    def _staged(self, point: Point, flat: Point, found: Measures) -> Measures:
        """The measures of a pipeline, by those of the point without its stages."""
        about, none = self._pipelines.measures(point, flat, found), _with_blocks(point, 0)
        held = holds_what_runs_again(Points.one(point))[0]
        if none == point or not held or self.floors.limit is None:
            return about
        kept = self.refined(none)
        return about if kept is None else replace(about, memory=max(about.memory, kept.memory))

    @property
    def _blocks(self) -> int:
        blocks = self.floors.facts.blocks
        return blocks.count if blocks is not None else 0

    def _is_partial(self, point: Point) -> bool:
        """True where some of the blocks run again, or wait in host memory, but not all."""
        return 0 < point.recompute + point.offload < self._blocks

    def _looked(self, point: Point) -> Point:
        """The point that is looked at for one: without stages, with all blocks like those that are not kept."""
        return _flat(_with_blocks(point, self._blocks) if self._is_partial(point) else point)

    def _in_part(self, point: Point) -> Measures | None:
        """On the line between none of the blocks and all of them."""
        none = self.refined(_with_blocks(point, 0))
        every = self.refined(_with_blocks(point, self._blocks))
        if none is None or every is None:
            return None
        return along(none, every, (point.recompute + point.offload) / self._blocks)

    def just_enough(self, point: Point) -> Point | None:
        """The point with as few blocks that run again, or wait, as have room; None where all must, or none must."""
        limit, count = self.floors.limit, point.recompute + point.offload
        if limit is None or count < self._blocks or not count:
            return None
        none, every = self.refined(_with_blocks(point, 0)), self.refined(point)
        if none is None or every is None or not self.has_room(point) or none.memory <= limit:
            return None
        more = none.memory - self.floors.reserve - self._room / self._larger(point)
        part = more / (none.memory - every.memory)
        parts = point.stages * point.turns
        fewest = ceil(max(part, 0.0) * self._blocks / parts) * parts
        return _with_blocks(point, fewest) if 0 < fewest < self._blocks else None

    def ahead(self, point: Point) -> bool:
        """Have a point's small steps planned by other processes that have time; false where none has."""
        missing = () if point in self.learned.points else self._needed(point)
        return all(
            self.lines.ahead(self.strategy(each)) for each in missing if each not in self._looks
        )

    def _look(self, flat: Point) -> Look:
        strategy = self.strategy(flat)
        answer = self.lines.of(strategy)
        self._learn_look(flat, answer)
        return Look(answer, self.lines.seconds_of_plan(strategy))

    def look(self, point: Point) -> Seconds:
        """Look at a point; its seconds as `seconds` gives them. Those of pipelines correct others alike, too."""
        seconds = self.seconds(point)
        found = self.refined(point)
        if point.stages > 1 and found is not None and point not in self.learned.points:
            self.learn(point, found)
        return seconds

    def seconds(self, point: Point) -> Seconds:
        """Seconds by which points are ordered once they were looked at: of those without room many more.

        Of one with fewer blocks that run again, or wait, where these suffice.
        """
        return self.seconds_as_it_stands(self.just_enough(point) or point)

    def seconds_as_it_stands(self, point: Point) -> Seconds:
        """Seconds as `seconds` gives them, of a point with as many blocks that run again, or wait, as it says."""
        found = self.refined(point)
        if found is None:
            look = self._looks.get(self._looked(point))
            small = look is not None and look.answer is None
            return self.rough_of(point) if small else Seconds(inf)
        over = found.memory / (self.floors.limit or inf)
        return Seconds(found.seconds * (max(over, 1.0) if self.is_near(point) else _NO_ROOM * over))

    def is_near(self, point: Point) -> bool:
        """True for a point that was looked at and should fit, or may fit after all."""
        found = self.refined(point)
        near = IN_STAGES if point.stages > 1 else BY_SMALL_STEPS
        return found is not None and found.memory <= near * (self.floors.limit or inf)

    def may_have_room(self, point: Point) -> bool:
        """True for a point that should fit, as far as is known."""
        if self.looked_at(point):
            return self.has_room(point)
        _, memory = self._corrected(self._rough.of(Points.one(point)))
        return bool(self._rough.roomy(memory)[0])

    def has_room(self, point: Point) -> bool:
        """True for a point that was looked at and should fit: a pipeline also where it takes more than that says."""
        found = self.refined(point)
        return found is not None and self._larger(point) * found.memory <= (
            self.floors.limit or inf
        )

    def _larger(self, point: Point) -> float:
        """Times as many bytes as estimated that a point may take."""
        if point.stages == 1 or point in self.learned.points:
            return 1.0
        known = self._pipelines.is_planned(point)
        return _LARGER_THAN_ALIKE if known else _LARGER[point.schedule]

    def looked_at(self, point: Point) -> bool:
        """True where nothing has to be planned for a point's estimates."""
        known = all(each in self._looks for each in self._needed(point))
        return known or point in self.learned.points

    def _needed(self, point: Point) -> tuple[Point, ...]:
        """The points that are looked at for one: of blocks that run again, or wait, also the one with none of them."""
        count = point.recompute + point.offload
        if self._is_partial(point) or (count and self.floors.limit is not None):
            return _flat(_with_blocks(point, 0)), self._looked(point)
        return (self._looked(point),)

    def seconds_of_plan(self, point: Point) -> float:
        """Seconds in which a point would be planned and simulated, about; 0 where no look says it.

        By its own look, else by one at a point with as many micro-batches or fewer, as `seconds_of_look`.
        """
        times = _IN_STAGES[point.schedule] if point.stages > 1 else 1.0
        look = self._looks.get(self._looked(point))
        known = look is not None and not isinstance(look.answer, Refused)
        return times * (look.seconds if look is not None and known else self._seconds_alike(point))

    def seconds_of_look(self, point: Point) -> float:
        """Seconds in which a point would be looked at, about; 0 where it was, or where nothing says it.

        By a look at one with as many micro-batches or fewer, layers cut or not: half of it hangs on their number.
        """
        if self.looked_at(point) or not self._blocks:
            return 0.0
        return (FEW + MORE) / self._blocks * self._seconds_alike(point)

    def _seconds_alike(self, point: Point) -> float:
        """Seconds in which a point without stages would be planned, by the look at the one most alike; 0 without."""
        looks = [
            ((flat.tensor > 1) == (point.tensor > 1), flat.micro_batches, look.seconds)
            for flat, look in self._looks.items()
            if flat.micro_batches <= point.micro_batches and not isinstance(look.answer, Refused)
        ]
        _, many, seconds = max(looks, default=(False, 1, 0.0))
        return seconds * (1 + point.micro_batches / many) / 2

    def learn_plan(self, point: Point, planned: Measures) -> None:
        """Correct the estimates of points alike by what a plan of this one took."""
        self.learn(point, planned)
        flat = _flat(point)
        look = self._looks.get(flat)
        if point.stages > 1 and look is not None and isinstance(look.answer, Measures):
            self._pipelines.learn(point, flat, look.answer, planned)

    def learn(self, point: Point, found: Measures) -> None:
        """Correct the rough estimates of points alike by what this one took."""
        rough = self._rough.of(Points.one(point))
        seconds = found.seconds / max(float(rough.seconds[0]), 1e-30)
        memory = (found.memory - self.floors.reserve) / max(float(rough.memory[0]), 1.0)
        self._alike.learn(rough.columns, seconds, memory)

    def _learn_look(self, flat: Point, answer: Answer | None) -> None:
        if isinstance(answer, Measures):
            self.learn(flat, answer)
        elif isinstance(answer, Refused) and flat.tensor > 1:
            self._alike.refuse(columns_of(Points.one(flat), self.floors.facts.samples))


def _with_blocks(point: Point, count: int) -> Point:
    """The point with so many blocks that run again, or wait, whichever do."""
    if point.offload:
        return replace(point, offload=count)
    return replace(point, recompute=count)


def _flat(point: Point) -> Point:
    """The point without its stages."""
    return replace(point, stages=1, schedule="", turns=1)
