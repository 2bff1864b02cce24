"""The least that a strategy can take, in seconds and bytes, before it is planned; and what it will take, about.

Floors are of what no plan of a point can leave out: the calls of the step, in pieces, and its update (`shared_work`);
gradients and parts of sums that are added up (`exchanges`). Queues run side by side, so the longest counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from weft.cached import cached_property
from weft.hardware.costs import Costs
from weft.hardware.topology_costs import TopologyCosts
from weft.hardware.usual.device import Device
from weft.search.bounds.exchanges import Exchanges
from weft.search.bounds.shared_work import SharedWork
from weft.search.space.point import Point
from weft.search.space.points import Floats, Points
from weft.search.steps.facts import StepFacts
from weft.units import Bytes, Seconds

# The part of the limit that a point which was not looked at may take by estimate.
_ROOM = 0.95
# A point that should lack room stands behind all that take so many times as long.
_CROWDED = 10.0
# Times as long as with the batch split over all ranks that other layouts take, about.
_FREE = 1.1


@final
@dataclass(frozen=True)
class Floors:
    """Floors of points for one step on one machine.

    Attributes:
        facts: of the step.
        limit: bytes of memory of a device, with what it reserves; None where that is not known.
    """

    facts: StepFacts
    limit: int | None

    @property
    def _costs(self) -> Costs:
        return self.facts.machine.costs

    @cached_property
    def work(self) -> SharedWork:
        """The work of the step."""
        return SharedWork(self.facts)

    @cached_property
    def exchanges(self) -> Exchanges:
        """The exchanges of points."""
        return Exchanges(self.facts)

    @cached_property
    def exact(self) -> bool:
        """True where pieces of calls are known to be no quicker than their part of the whole."""
        return isinstance(self._costs, TopologyCosts | Device)

    def least_of(self, point: Point) -> Seconds:
        """Seconds that a step of this point takes at least."""
        return Seconds(float(self.least(Points.one(point))[0]))

    def least(self, points: Points) -> Floats:
        """Seconds that steps of points take at least."""
        if not self.exact:
            return self._peaks(points)
        work, exchanges = self.work, self.exchanges
        floors = (
            work.chain(points),
            work.busy(points, least=True),
            exchanges.reduction(points, least=True),
            exchanges.sums(points, least=True),
        )
        found: Floats = np.max(floors, axis=0)
        return found

    def about(self, points: Points) -> Floats:
        """Seconds that steps take about, with room or without: exchanges are half hidden, starts and bubbles count.

        Layouts that deduction finds are seldom better than the batch split over all ranks.
        """
        if not len(points):
            return np.zeros(0)
        free = points.laid("free") & (points.tensor > 1)
        if free.any():
            found = np.empty(len(points))
            found[free] = _FREE * self._estimated(points.where(free).data_parallel())
            found[~free] = self._estimated(points.where(~free))
            return found
        return self._estimated(points)

    def _estimated(self, points: Points) -> Floats:
        if not len(points):
            return np.zeros(0)
        whole = points.laid_as("free", "data")
        busy = self.work.busy(points)
        waiting = self.exchanges.sums(points) * np.where(points.laid("sequence"), 0.7, 1.0)
        reduced = self.exchanges.reduction(whole) * _times_reduced(points)
        busy = busy * points.unevenness(self.facts.samples) + self._sent(points)
        late = (points.stages - 1) / (points.micro_batches * points.turns)
        even = busy * (self.work.unevenness(points) + late)
        exposed = np.maximum(reduced - busy / 2, 0.05 * reduced)
        found: Floats = even + waiting + exposed + self.work.updates_again(points)
        return found

    def crowding(self, memory: Floats) -> Floats:
        """1 where points have room, probably; else more the more they lack.

        Args:
            memory: bytes that each takes about, beside what devices reserve.
        """
        if self.limit is None:
            return np.ones(len(memory))
        over = memory / (_ROOM * max(self.limit - self.reserve, 1))
        return np.where(over > 1, _CROWDED * over, 1.0)

    def memory_about(self, points: Points) -> Floats:
        """Bytes that a rank takes about, beside what its device reserves."""
        free = points.laid("free") & (points.tensor > 1)
        found = np.empty(len(points))
        found[free] = self._memory_about(points.where(free).data_parallel())
        found[~free] = self._memory_about(points.where(~free).laid_as("free", "data"))
        return found

    def _sent(self, points: Points) -> Floats:
        """Seconds in which a rank sends what blocks keep to the host, and gets it back."""
        blocks = self.facts.blocks
        if blocks is None or not points.offload.any():
            return np.zeros(len(points))
        part = points.offload / blocks.count / points.ranks
        return 2 * self.work.to_host(Bytes(int(self.facts.kept))) * part

    def _memory_about(self, points: Points) -> Floats:
        """Bytes that a rank takes about, where layouts are those that people write by hand."""
        m, s, facts = points.micro_batches, points.stages, self.facts
        flying = np.where(points.scheduled("gpipe"), m, np.minimum(s, m))
        count = facts.blocks.count if facts.blocks is not None else 1
        away = 0.85 * (points.recompute + points.offload) / count
        kept = facts.kept * (1 - away)
        cut = s * np.where(points.laid("data"), 1, points.tensor)
        whole = np.where(
            (points.zero == 1) | (points.zero == 2), facts.parameters * facts.narrowed, 0.0
        )
        part = s * points.data * points.tensor * m
        # Sums of several micro-batches are there as long as these are; those of one stand in what is kept.
        summed = np.where((m > 1) & (points.zero < 2), facts.parameters, 0.0)
        beside = whole * (1 - 1 / points.data) + summed
        return self._held(points) + kept * flying / part + beside / cut

    def _peaks(self, points: Points) -> Floats:
        """The operations of the step over those that all devices can do in a second, in any dtype."""
        peaks = [
            max(self._costs.capacity(rank).peaks.values(), default=0.0) for rank in self.facts.ranks
        ]
        if not all(peaks):
            return np.zeros(len(points))
        used = np.cumsum(sorted(peaks)[::-1])
        found: Floats = self.facts.flops / used[points.ranks - 1]
        return found

    def states_of(self, point: Point) -> float:
        """Bytes of parameters and optimizer states on a rank, and what its device reserves, at least."""
        return float(self.states(Points.one(point))[0])

    def states(self, points: Points) -> Floats:
        """Bytes of parameters and optimizer states of each point on a rank, with what its device reserves.

        Where devices have unlike limits, as they compare with the least of these: `Measures.memory`.
        """
        found: Floats = np.maximum(self._held(points) + self._beside[points.ranks - 1], 0.0)
        return found

    def _held(self, points: Points) -> Floats:
        """Bytes of parameters and optimizer states of each point on a rank, the mean of all."""
        cut = np.where(points.laid("data"), 1, points.tensor)
        shards = np.where((points.zero > 0) | points.laid("free"), points.data, 1)
        whole = self.facts.states + self.facts.parameters
        split = points.experts & (shards == 1)
        left = whole - np.where(split, self.facts.expert_bytes * (1 - 1 / points.data), 0.0)
        # What the user splits may be so along all axes.
        laid = self.facts.laid_bytes
        every = points.data * points.tensor
        found: Floats = ((left - laid) / (cut * shards) + laid / every) / points.stages
        return found

    @cached_property
    def _beside(self) -> Floats:
        """For each number of ranks, what their devices reserve, less their limits above the least of all; the mean."""
        machine, least = self.facts.machine, self.facts.machine.least_limit or 0
        costs, ranks = self._costs, self.facts.ranks
        every = [costs.capacity(rank).reserve - (machine.limit_of(rank) - least) for rank in ranks]
        found: Floats = np.cumsum(every) / np.arange(1, len(ranks) + 1)
        return found

    @cached_property
    def reserve(self) -> int:
        """Bytes that a device reserves, the mean of all, as they compare with the least limit."""
        return int(self._beside[-1])

    def memory_of(self, point: Point) -> Bytes:
        """Bytes that a rank takes at least."""
        return Bytes(int(self.states_of(point)))

    def memory(self, points: Points) -> Floats:
        """Bytes that a rank takes at least, for each point."""
        return np.floor(self.states(points))


def _times_reduced(points: Points) -> Floats:
    """Times as long as their gradients are added up once that exchanges along the data axis take.

    A gather of parameters takes as long as a reduction to shards. With ZeRO 1 there is one of each in a step, with
    ZeRO 2 a reduction in each micro-batch, with ZeRO 3 also a gather in its forward and one in its backward.
    """
    each = points.micro_batches
    levels = [points.zero == level for level in (1, 2, 3)]
    return np.select(levels, [np.full_like(each, 2), each + 1, 3 * each], 1).astype(np.float64)
