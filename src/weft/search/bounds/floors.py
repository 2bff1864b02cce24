"""The least that a strategy can take, in seconds and bytes, before it is planned; and what it will take, about.

Floors are of what no plan of a point can leave out: the calls of the step, in pieces, and its update (`shared_work`);
gradients and parts of sums that are added up (`exchanges`). Queues run side by side, so the longest counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import final

from weft.cached import cached_property
from weft.hardware.costs import Costs
from weft.hardware.topology_costs import TopologyCosts
from weft.hardware.usual.device import Device
from weft.search.bounds.exchanges import Exchanges
from weft.search.bounds.shared_work import SharedWork
from weft.search.space import Point
from weft.search.steps.facts import StepFacts
from weft.units import Bytes, Seconds

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

    def least(self, point: Point) -> Seconds:
        """Seconds that a step of this point takes at least."""
        if not self.exact:
            return self._peaks(point)
        work, exchanges = self.work, self.exchanges
        return Seconds(
            max(
                work.chain(point),
                work.busy(point, least=True),
                exchanges.reduction(point, least=True),
                exchanges.sums(point, least=True),
            )
        )

    def estimate(self, point: Point) -> Seconds:
        """Seconds that a step takes about: exchanges are half hidden, starts and bubbles count.

        Layouts that deduction finds are seldom better than the batch split over all ranks.
        """
        if point.layouts == "free" and point.tensor > 1:
            flat = replace(point, data=point.data * point.tensor, tensor=1, layouts="data")
            return Seconds(_FREE * self.estimate(flat))
        busy = self.work.busy(point)
        waiting = self.exchanges.sums(point) * (0.7 if point.layouts == "sequence" else 1.0)
        whole = replace(point, layouts="data") if point.layouts == "free" else point
        reduced = self.exchanges.reduction(whole) * (1.5 if point.zero == 3 else 1.0)
        even = busy * (1 + (point.stages - 1) / point.micro_batches)
        late = even + waiting + max(reduced - busy / 2, 0.05 * reduced)
        over = self._likely(point) / (self.limit or inf)
        return Seconds(late * (10.0 * over if over > 1 else 1.0))

    def _likely(self, point: Point) -> float:
        """Bytes that a rank takes about."""
        flying = (
            min(point.stages, point.micro_batches)
            if point.schedule != "gpipe"
            else point.micro_batches
        )
        part = point.stages * point.data * point.tensor * point.micro_batches
        kept = self.facts.kept * (0.15 if point.recompute else 1.0)
        held = replace(point, layouts="data") if point.layouts == "free" else point
        cut = point.stages * (point.tensor if held.layouts != "data" else 1)
        whole = self.facts.parameters * self.facts.narrowed if point.zero in (1, 2) else 0.0
        return self.states(held) + kept * flying / part + whole * (1 - 1 / point.data) / cut

    def _peaks(self, point: Point) -> Seconds:
        """The operations of the step over those that all devices can do in a second, in any dtype."""
        peaks = [
            max(self._costs.capacity(rank).peaks.values(), default=0.0) for rank in self.facts.ranks
        ]
        used = sum(sorted(peaks)[::-1][: point.ranks])
        return Seconds(self.facts.flops / used if all(peaks) and used else 0.0)

    def states(self, point: Point) -> float:
        """Bytes of parameters and optimizer states on a rank, and what its device reserves, at least."""
        facts, cut = self.facts, point.tensor if point.layouts != "data" else 1
        shards = point.data if point.zero else 1
        states = facts.states / cut / shards
        held = facts.parameters / cut / shards
        if point.layouts == "free":
            states, held = states / point.data, held / point.data
        return (states + held) / point.stages + self._costs.capacity(self.facts.ranks[0]).reserve

    def memory(self, point: Point) -> Bytes:
        """Bytes that a rank takes at least."""
        return Bytes(int(self.states(point)))
