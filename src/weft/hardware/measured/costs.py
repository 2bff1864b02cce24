"""MeasuredCosts: seconds that were measured on a machine, of calls, updates, exchanges and acts.

What was measured is taken as it is. A call of another size takes as much longer than the nearest measured call of
its op as the usual device says; exchanges and updates of other sizes lie on straight lines between those that were
measured. Everything else is an estimate by the roofline of the machine, and says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import hypot, log
from typing import final

from weft.cached import cached_property
from weft.hardware.costs import Capacity, Cost, Groups, Sent
from weft.hardware.durations import call_text, exchange_text
from weft.hardware.measured.figures import RANKS, Measurements, Sample, SizedSample, on_line
from weft.hardware.usual import Device
from weft.ir.plan_nodes import CollectiveKind
from weft.ops import OpCall
from weft.units import Bytes, Seconds

# Calls of one op whose estimates are further apart than this factor say nothing of one another.
_FAR = 8.0
# Relative standard deviations of what no measurement shows: how the speed of a machine moves from measuring to running,
# and, with several ranks, how they wait for whoever is late. From half of the steps of docs/accuracy.md.
_UNKNOWN_OF_ONE, _UNKNOWN_OF_SEVERAL = 0.035, 0.09
_UNKNOWN = "this machine was not measured (weft measure): usual figures of its device type"


@final
@dataclass(frozen=True)
class MeasuredCosts:
    """The costs of a machine that was measured, the same for all ranks.

    Attributes:
        measured: the figures.
        usual: says how calls of other sizes compare.
        stands_in: where the figures are those of another set-up, which; all costs are estimates then.
    """

    measured: Measurements
    usual: Device
    stands_in: str = ""

    def like(self, rank: int) -> int:
        """All ranks are alike."""
        return 0

    def capacity(self, rank: int) -> Capacity:
        """The processor, its memory, how steady it is, what exchanges slow down, and the host's overhead for a step."""
        name = str(self.measured.machine.get("processor", "measured"))
        found = self.measured
        return Capacity(
            *(name, {}, found.memory),
            slowdown=found.slowdown,
            drift=hypot(found.drift, _UNKNOWN_OF_ONE if self._alone else _UNKNOWN_OF_SEVERAL),
            step=found.step,
        )

    @property
    def _alone(self) -> bool:
        """True where one rank was at work."""
        return self.measured.machine.get(RANKS, 1) == 1

    @cached_property
    def device(self) -> Device:
        """The machine in a few figures: its roofline and its links, usual ones where they were not measured."""
        found = self.usual
        if self.measured.roofline is not None:
            flops, traffic, start = self.measured.roofline
            found = replace(found, flops=flops, traffic=traffic, start=start)
        return _with_links(found, self.measured)

    def of_call(self, rank: int, call: OpCall, lies: Sequence[str] = ()) -> Cost:
        """As measured; in proportion to the nearest call of the op; else by the roofline."""
        found = self.measured.calls.get(call_text(call, lies))
        if found is not None:
            return Cost(found.seconds, found.spread, self.stands_in)
        usual = self.usual.of_call(rank, call).seconds
        near = self._nearest(call.op, usual)
        if near is None:
            return self._missing(self.device.of_call(rank, call), f"{call.op} was not measured")
        scaled = Seconds(near.seconds * usual / near.usual)
        return Cost(scaled, near.spread, f"{call.op} was measured for other sizes")

    @cached_property
    def _of_op(self) -> dict[str, list[Sample]]:
        found: dict[str, list[Sample]] = {}
        for text, sample in self.measured.calls.items():
            if sample.usual > 0:
                found.setdefault(text.partition("(")[0], []).append(sample)
        return found

    def _nearest(self, op: str, usual: Seconds) -> Sample | None:
        """The sample of an op that is nearest in size."""
        if usual <= 0:
            return None
        apart = [(abs(log(each.usual / usual)), each) for each in self._of_op.get(op, ())]
        best = min(apart, default=None)
        return best[1] if best and best[0] <= log(_FAR) else None

    def of_update(self, rank: int, rule: str, moved: Bytes, together: int = 1) -> Cost:
        """On the line between the sizes that were measured, with a share of what starting takes."""
        points = self.measured.updates.get(rule)
        if points:
            start = points[0].seconds if points[0].bytes == 0 else 0.0
            cost = self._on_line(points[1:] if len(points) > 1 and start else points, moved)
            return cost._replace(seconds=Seconds(cost.seconds + start / together))
        cost = self.device.of_update(rank, rule, moved)
        return self._missing(cost, f"updates by {rule} were not measured")

    def of_act(self, rank: int) -> Seconds:
        """As measured."""
        return self.measured.act

    def of_collective(
        self, kind: CollectiveKind, size: Bytes, moved: Bytes, groups: Groups
    ) -> Cost:
        """On the line between the sizes that were measured for as many ranks."""
        name = exchange_text(kind, len(groups[0]))
        points = self.measured.exchanges.get(name)
        if points:
            return self._exchanged(points, size)
        cost = self.device.of_collective(kind, size, moved, groups)
        return self._missing(cost, f"{name} ranks was not measured")

    def of_transfer(self, sent: Sent, moved: Bytes) -> Cost:
        """On the line between the sizes that were measured between two ranks."""
        name = exchange_text("transfer", 2)
        points = self.measured.exchanges.get(name)
        if points:
            return self._exchanged(points, moved)
        cost = self.device.of_transfer(sent, moved)
        return self._missing(cost, f"{name} ranks was not measured")

    def _on_line(self, points: tuple[SizedSample, ...], size: Bytes) -> Cost:
        return on_line(points, size)._replace(estimate=self.stands_in)

    def _exchanged(self, points: tuple[SizedSample, ...], size: Bytes) -> Cost:
        """With what an act of a communicator takes longer than another one."""
        cost = self._on_line(points, size)
        more = max(0.0, self.measured.exchange - self.measured.act)
        return cost._replace(seconds=Seconds(cost.seconds + more))

    def _missing(self, cost: Cost, what: str) -> Cost:
        """An estimate, with the reason why it is one."""
        known = self.measured.calls or self.measured.exchanges
        return cost._replace(estimate=what if known else _UNKNOWN)


def _with_links(device: Device, measured: Measurements) -> Device:
    """The device with the latency and the rate of exchanges as measured, where some were: those of the most ranks."""
    every = {name: points for name, points in measured.exchanges.items() if len(points) > 1}
    points = next((every[name] for name in sorted(every, reverse=True) if "transfer" in name), ())
    if not points:
        return device
    first, last = points[0], points[-1]
    rate = (last.bytes - first.bytes) / max(last.seconds - first.seconds, 1e-9)
    return replace(device, link=rate, latency=first.seconds)
