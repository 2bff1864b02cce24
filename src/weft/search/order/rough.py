"""Rough estimates: seconds and bytes of points before anything of them is planned.

They have the terms of floors, and what floors leave out: starts, bubbles, and exchanges that nothing hides.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple, final

import numpy as np

from weft.cached import cached_property
from weft.search.bounds.floors import Floors
from weft.search.order.alike import Columns, columns_of
from weft.search.order.in_stages import holds_what_runs_again
from weft.search.order.little_room import ROUGHLY
from weft.search.space.point import Point
from weft.search.space.points import Floats, Mask, Points
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
