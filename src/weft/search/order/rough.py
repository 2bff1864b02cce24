"""Rough estimates: seconds and bytes of points before anything of them is planned.

They have the terms of floors, and what floors leave out: starts, bubbles, and exchanges that nothing hides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import NamedTuple, TypeAlias, final

import numpy as np

from weft.cached import cached_property
from weft.search.bounds.floors import Floors
from weft.search.order.in_stages import holds_what_runs_again
from weft.search.space.point import Point
from weft.search.space.points import Floats, Ints, Mask, Points
from weft.units import Bytes

# The part of the limit that a point which was not looked at may take by estimate.
_ROOM = 0.95
# Points that lack more than a little room stand behind all that take so many times as long; chosen by hand.
_CROWDED = 10.0
# The part of what is kept that is not where all blocks run again, about.
_AWAY = 0.85
# Times as long as with the batch split over all ranks that other layouts take, about.
_FREE = 1.1
# Times as long as by these terms that uneven samples are thought to take: where a step joins them with another
# dimension, such as tokens, their shards cannot stay as they are.
_UNEVEN = 2.0
# The part of the seconds of sums that counts where positions are split between layers: other calls hide some of what
# each becomes, a reduction to shards and a gather.
_SEQUENCE = 0.7
# The part of its work behind which a rank hides the exchange of gradients: about that of the backward that follows the
# first of them.
_HIDING = 0.5
# The part of that exchange that nothing hides, at least: the last gradients come when the backward has ended.
_EXPOSED = 0.05


@final
class Rough(NamedTuple):
    """Estimates of points before any plan, and the columns that those of points alike have in common.

    Attributes:
        seconds: of a step, with room or without.
        memory: bytes beside what devices reserve.
        columns: by name.
    """

    seconds: Floats
    memory: Floats
    columns: Columns


@final
class RoughParts(NamedTuple):
    """All that is said of points before any plan.

    Attributes:
        points: as they stand.
        every: those of which all blocks run again, or wait, where memory has a limit.
        kept: the same of these with no such block.
    """

    points: Rough
    every: Mask
    kept: Rough


@final
@dataclass(frozen=True)
class RoughEstimates:
    """Rough estimates of points for one step on one machine.

    Attributes:
        floors: of points.
    """

    floors: Floors

    def parts(self, points: Points) -> RoughParts:
        """All that is said of points, which does not change in a search."""
        facts, limit = self.floors.facts, self.floors.limit
        blocks = facts.blocks.count if facts.blocks is not None and limit is not None else 0
        every: Mask = (points.recompute + points.offload == blocks) & (blocks > 0)
        return RoughParts(self.of(points), every, self.of(points.where(every).with_all_kept()))

    def of(self, points: Points) -> Rough:
        """Seconds and bytes of points, and their columns."""
        columns = columns_of(points, self.floors.facts.samples)
        seconds = self.seconds(points) * np.where(columns["uneven"], _UNEVEN, 1.0)
        return Rough(seconds, self.memory(points), columns)

    def crowding(self, memory: Floats) -> Floats:
        """1 where points should have room; else more the more they lack.

        Args:
            memory: bytes that each takes about, beside what devices reserve.
        """
        over = self._over(memory)
        return np.where(over > ROUGHLY, _CROWDED * over, np.maximum(over, 1.0))

    def roomy(self, memory: Floats) -> Mask:
        """True for points that should have room, of bytes as `crowding` takes them."""
        found: Mask = self._over(memory) <= 1
        return found

    def _over(self, memory: Floats) -> Floats:
        """Bytes over those that points may take which were not looked at."""
        floors = self.floors
        room = inf if floors.limit is None else _ROOM * max(floors.limit - floors.reserve, 1)
        return memory / room

    def seconds(self, points: Points) -> Floats:
        """Seconds that steps take about, with room or without: exchanges are half hidden, starts and bubbles count.

        Layouts that deduction finds are seldom better than the batch split over all ranks.
        """
        times, points = np.where(_is_wide(points), _FREE, 1.0), _as_data_parallel(points)
        work, exchanges = self.floors.work, self.floors.exchanges
        waiting = exchanges.sums(points) * np.where(points.laid("sequence"), _SEQUENCE, 1.0)
        reduced = exchanges.reduction(points) * _times_reduced(points)
        busy = work.busy(points) * points.unevenness(self.floors.facts.samples) + self._sent(points)
        uneven, m = work.unevenness(points), points.micro_batches
        late = np.maximum((points.stages - 1) / (m * points.turns), points.stages / m - uneven)
        even = busy * (uneven + late)
        exposed = np.maximum(reduced - _HIDING * busy, _EXPOSED * reduced)
        found: Floats = times * (even + waiting + exposed + work.updates_again(points))
        return found

    def _sent(self, points: Points) -> Floats:
        """Seconds in which a rank sends what blocks keep to the host, and gets it back."""
        facts = self.floors.facts
        if facts.blocks is None or not points.offload.any():
            return np.zeros(len(points))
        part = points.offload / facts.blocks.count / points.ranks
        return 2 * self.floors.work.to_host(Bytes(int(facts.kept))) * part

    def memory(self, points: Points) -> Floats:
        """Bytes that a rank takes about, beside what its device reserves."""
        points = _as_data_parallel(points)
        m, s, facts = points.micro_batches, points.stages, self.floors.facts
        flying = np.where(points.scheduled("gpipe"), m, np.minimum(s, m))
        count = facts.blocks.count if facts.blocks is not None else 1
        again = (points.recompute + points.offload) / count * ~holds_what_runs_again(points)
        kept = facts.kept * (1 - self._part_away * again) if again.any() else facts.kept
        cut = s * np.where(points.laid("data"), 1, points.tensor)
        whole = np.where(
            (points.zero == 1) | (points.zero == 2), facts.parameters * facts.narrowed, 0.0
        )
        part = s * points.data * points.tensor * m
        # Sums of several micro-batches are there as long as these are; those of one stand in what is kept.
        shards = np.where(points.zero < 2, 1, points.data)
        summed = np.where(m > 1, facts.trained / shards, 0.0)
        beside = whole * (1 - 1 / points.data) + summed
        return self.floors.variables(points) + kept * flying / part + beside / cut

    @cached_property
    def _part_away(self) -> float:
        """The part of what is kept that is not where all blocks run again; plans say it where memory is tight."""
        facts = self.floors.facts
        everywhere = Points.one(Point(len(facts.ranks)))
        if self.floors.limit is None or self.roomy(self.memory(everywhere))[0]:
            return _AWAY
        return 1 - facts.kept_again / max(facts.kept, 1)


def _as_data_parallel(points: Points) -> Points:
    """With the batch split over all ranks in place of layouts that deduction finds."""
    wide = _is_wide(points)
    rows = points.laid_as("free", "data").rows
    rows[wide] = points.where(wide).data_parallel().rows
    return Points(rows)


def _is_wide(points: Points) -> Mask:
    """True for those that deduction lays out on two axes."""
    found: Mask = points.laid("free") & (points.tensor > 1)
    return found


def _times_reduced(points: Points) -> Floats:
    """Times as long as their gradients are added up once that exchanges along the data axis take.

    A gather of parameters takes as long as a reduction to shards. With ZeRO 1 there is one of each in a step, with
    ZeRO 2 a reduction in each micro-batch, with ZeRO 3 also a gather in its forward and one in its backward.
    """
    each = points.micro_batches
    levels = [points.zero == level for level in (1, 2, 3)]
    return np.select(levels, [np.full_like(each, 2), each + 1, 3 * each], 1).astype(np.float64)


# Room that is lacking a little: up to how many times its room a point may take, and is not given up.
#
# One idea, by how well the bytes of the point are known. Up to it there may be room after all, or blocks that run again
# may give it; so it stands behind others by what it lacks, not behind all. With such points behind all others 5 of 33
# searches under tight limits ended slower than by hand, by up to 15 %; with these factors 2 of 21, by 0.8 % at most.


# By a rough estimate: that was 0.87 to 1.33 times what plans take, of 32 points of two decoders. Chosen by hand below
# the most of these, since one that lacks more is seldom the one that is looked for.
ROUGHLY = 1.25
# By small steps, of points without stages: these hold to a hundredth, so that what lacks room lacks it.
BY_SMALL_STEPS = 1.0
# The same of pipelines, by their point without stages: to a tenth, in several turns to a half, so about as rough.
IN_STAGES = ROUGHLY
# By its own plan, which is exact: only blocks that run again help then. Chosen by hand: some of them give a tenth.
BY_ITS_PLAN = 1.1


Column: TypeAlias = Ints | Mask
# What points have in common, by name, a row for each.
Columns: TypeAlias = Mapping[str, Column]
_Key: TypeAlias = tuple[tuple[str, int], ...]

# What points have in common that are alike, the most alike last.
_LAID = ("layouts", "staged", "uneven")
_CUT = (*_LAID, "experts", "tensor", "outer")
_AGAIN = (*_CUT, "recompute")
_ALIKE: tuple[tuple[str, ...], ...] = ((), _LAID, _CUT)
# The same where samples of a micro-batch matter: of these the ones with as many count, or else with nearly as many.
_ALIKE_IN_SAMPLES: tuple[tuple[str, ...], ...] = (_AGAIN, (*_AGAIN, "gathers"))
# What points have in common that take about as many bytes, the most alike last.
_AS_LARGE: tuple[tuple[str, ...], ...] = (
    ("staged", "zero", "recompute"),
    ("staged", "zero", "recompute", "layouts"),
    ("staged", "zero", "recompute", "layouts", "tensor", "samples"),
)
# What points have in common that are refused together, and times as long as estimated that they are thought to take.
_REFUSED_ALIKE, _REFUSED = ("layouts", "tensor", "outer"), 2.0


@final
class Ratios(NamedTuple):
    """Measures of each of some points over rough estimates of them.

    Attributes:
        seconds: of a step.
        memory: bytes beside what devices reserve.
    """

    seconds: Floats
    memory: Floats


@final
class Alike:
    """Ratios of points, better with each that is learned."""

    def __init__(self) -> None:
        self._seconds = dict[_Key, list[float]]()
        self._in_samples = dict[_Key, dict[int, list[float]]]()
        self._memory = dict[_Key, list[float]]()
        self._refused = set[_Key]()

    @property
    def known(self) -> int:
        """The number of points that were learned."""
        return len(self._seconds.get((), ())) + len(self._refused)

    def learn(self, columns: Columns, seconds: float, memory: float) -> None:
        """Correct those alike by what a point took over its rough estimate; its columns have one row."""
        for ratios, alike, ratio in (
            (self._seconds, _ALIKE, seconds),
            (self._memory, _AS_LARGE, memory),
        ):
            for names in alike:
                ratios.setdefault(_key(names, columns), []).append(ratio)
        for names in _ALIKE_IN_SAMPLES:
            known = self._in_samples.setdefault(_key(names, columns), {})
            known.setdefault(int(columns["samples"][0]), []).append(seconds)

    def refuse(self, columns: Columns) -> None:
        """Have those alike wait for others, as a point with a tensor axis was refused: most would be refused, too."""
        self._refused.add(_key(_REFUSED_ALIKE, columns))

    def ratios(self, columns: Columns) -> Ratios:
        """Of each point the ratios of those most alike of which any are known; 1 where none are."""
        seconds = _median(self._seconds, columns)
        for key in sorted(self._in_samples, key=len):
            alike = _like(key, columns)
            seconds[alike] = _nearest(self._in_samples[key], columns["samples"][alike])
        for key in self._refused:
            seconds[_like(key, columns)] *= _REFUSED
        return Ratios(seconds, _median(self._memory, columns))


def columns_of(points: Points, samples: int) -> Columns:
    """The columns of points, of a batch with so many samples."""
    return {
        "layouts": points.layouts,
        "staged": points.stages > 1,
        "tensor": points.tensor,
        "outer": points.outer,
        "samples": samples // (points.data * points.micro_batches),
        "uneven": samples % (points.data * points.micro_batches) > 0,
        "recompute": points.recompute > 0,
        "experts": points.experts,
        "gathers": points.zero == 3,
        "zero": points.zero,
    }


def _median(ratios: Mapping[_Key, list[float]], columns: Columns) -> Floats:
    found = np.ones(len(columns["zero"]))
    for key in sorted(ratios, key=len):
        found[_like(key, columns)] = median(ratios[key])
    return found


def _nearest(known: Mapping[int, list[float]], samples: Column) -> Floats:
    """For each number of samples the median of the ratios that are known of the nearest one, by their quotient."""
    numbers = np.array(sorted(known))
    ratios = np.array([median(known[number]) for number in numbers])
    apart = np.abs(np.log((samples[:, None] + 1) / (numbers + 1)))
    found: Floats = ratios[apart.argmin(axis=1)]
    return found


def _key(names: Iterable[str], columns: Columns) -> _Key:
    """By which the first of some points is known again in others alike."""
    return tuple((name, int(columns[name][0])) for name in names)


def _like(key: _Key, columns: Columns) -> Mask:
    """The points that are as the key says."""
    found: Mask = np.ones(len(columns["zero"]), np.bool_)
    for name, value in key:
        found &= columns[name] == value
    return found
