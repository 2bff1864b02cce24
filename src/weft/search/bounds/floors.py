"""The least that a strategy can take, in seconds and bytes, before it is planned.

Floors are of what no plan of a point can leave out: the calls of the step, in pieces, and its update (`shared_work`);
gradients and parts of sums that are added up (`exchanges`). Queues run side by side, so the longest counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import final

import numpy as np

from weft.cached import cached_property
from weft.hardware.costs import Costs
from weft.hardware.topology_costs import TopologyCosts
from weft.hardware.usual.device import Device
from weft.search.bounds.exchanges import Exchanges
from weft.search.bounds.shared_work import SharedWork
from weft.search.space.point import Point
from weft.search.space.points import Floats, Mask, Points
from weft.search.steps.facts import StepFacts


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
        found: Floats = np.maximum(self.variables(points) + self._beside[points.ranks - 1], 0.0)
        return found

    def variables(self, points: Points) -> Floats:
        """Bytes of variables of each point on a rank, the mean of all: parameters, buffers and optimizer states."""
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

    def memory(self, points: Points) -> Floats:
        """Bytes that a rank takes at least, for each point."""
        return np.floor(self.states(points))

    def may_fit(self, points: Points) -> Mask:
        """True for points that take no more memory at least than the limit."""
        found: Mask = self.memory(points) <= (inf if self.limit is None else self.limit)
        return found
