"""Measured costs of a machine: the figures, their file, the figures that plans take, and the seconds that follow.

A measured call costs its measured seconds. A call of another size takes as much longer than the nearest measured call
of its op as the usual device says; exchanges and updates of other sizes are on straight lines between those that were
measured. Everything else is an estimate by the roofline of the machine, and says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import hypot, log
from typing import Annotated, NamedTuple, TypeAlias, final

from weft.cached import cached_property
from weft.errors import UNREADABLE, UserError, wrong
from weft.hardware.costs import NO_SLOWDOWN, Capacity, Contention, Cost, DefaultDevice, Groups, Sent
from weft.hardware.durations import call_text, exchange_text
from weft.ir.plan_nodes import CollectiveKind
from weft.ops import OpCall
from weft.schema import Bounds, Length, read
from weft.units import NO_TIME, Bytes, Seconds

# The facts by which files are chosen, beside those of the machine.
DEVICE, RANKS, PROCESSES, THREADS = "device", "ranks", "processes", "threads"


@final
class Sample(NamedTuple):
    """Measured seconds.

    Attributes:
        seconds: the median.
        spread: relative standard deviation, from the quartiles.
        usual: seconds by the usual device, to compare calls of one op with.
    """

    seconds: Seconds
    spread: float = 0.0
    usual: Seconds = NO_TIME


@final
class SizedSample(NamedTuple):
    """Measured seconds of so many bytes."""

    bytes: Bytes
    seconds: Seconds
    spread: float = 0.0


Sizes: TypeAlias = Annotated[tuple[SizedSample, ...], Length(1)]


@final
class Roofline(NamedTuple):
    """A rank's device as general calls show it, for calls that were not measured.

    Attributes:
        flops: floating-point operations a second, in float32.
        traffic: bytes a second that it reads and writes in its own memory.
        start: seconds that any call takes.
    """

    flops: Annotated[float, Bounds(above=0)]
    traffic: Annotated[float, Bounds(above=0)]
    start: Seconds


@final
@dataclass(frozen=True)
class Measurements:
    """The figures of one machine.

    Attributes:
        machine: what they hold for: processor, cores, torch, device, threads of a rank, ranks at work at the same time,
            processes that they run in.
        calls: by `call_text`.
        updates: by the rule of the optimizer, by bytes that an update reads and writes, ascending; what starting takes,
            once for all variables that are updated together, at 0 bytes.
        exchanges: by `exchange_text`, by bytes, ascending; "transfer of 2" from one rank to another.
        act: overhead of the host for an act, beyond its calls.
        exchange: overhead of the host for an act of a communicator, beyond the exchange.
        step: overhead of the host for a step, beyond its acts.
        slowdown: of calls and exchanges beside each other.
        drift: relative standard deviation that all calls have in common, from one round of them to the next.
        memory: of a rank's device, where it is known.
        roofline: of a rank's device, where general calls were measured.
    """

    machine: Mapping[str, Annotated[str, Length(0)] | int]
    calls: Mapping[str, Sample] = field(default_factory=dict)
    updates: Mapping[str, Sizes] = field(default_factory=dict)
    exchanges: Mapping[str, Sizes] = field(default_factory=dict)
    act: Seconds = NO_TIME
    exchange: Seconds = NO_TIME
    step: Seconds = NO_TIME
    slowdown: Contention = NO_SLOWDOWN
    drift: float = 0.0
    memory: Bytes | None = None
    roofline: Roofline | None = None

    def joined(self, other: Measurements) -> Measurements:
        """These measurements joined with later ones of the same machine; later figures count.

        Slowdown and drift are always the later ones'.

        Raises:
            UserError: when the machines differ.
        """
        if dict(self.machine) != dict(other.machine):
            own, others = (
                ", ".join(f"{key} {each}" for key, each in found.machine.items())
                for found in (self, other)
            )
            raise UserError(f"measured on {own}, not on {others}; run `weft measure` here")
        return replace(
            other,
            calls={**self.calls, **other.calls},
            updates={**self.updates, **other.updates},
            exchanges={**self.exchanges, **other.exchanges},
            act=other.act or self.act,
            exchange=other.exchange or self.exchange,
            step=other.step or self.step,
            memory=other.memory or self.memory,
            roofline=other.roofline or self.roofline,
        )


def on_line(points: Sequence[SizedSample], size: Bytes) -> Cost:
    """The seconds of so many bytes, on the line through the two nearest sizes; never less than the smallest took."""
    if len(points) == 1:
        return Cost(points[0].seconds, points[0].spread)
    after = next((n for n, each in enumerate(points) if each.bytes >= size), len(points) - 1)
    low, high = points[max(after, 1) - 1], points[max(after, 1)]
    slope = (high.seconds - low.seconds) / (high.bytes - low.bytes)
    seconds = low.seconds + max(slope, 0.0) * (size - low.bytes)
    near = low if abs(size - low.bytes) < abs(high.bytes - size) else high
    floor = points[0].seconds if size >= points[0].bytes else 0.0
    return Cost(Seconds(max(seconds, floor, 0.0)), near.spread)


# Settled figures: measurements as plans take them, which noise does not change.
#
# A figure is rounded when it is first measured, and stays until one is measured that is further off than noise. So a
# machine that is measured again gives the same plans, wherever its figures lie; rounding alone would change those that
# lie near a border.


# Figures apart by no more than this factor are the same but for noise: twice 10 %, and what rounding adds.
NOISE = 1.3


def planned_figures(before: Measurements | None, found: Measurements) -> Measurements:
    """The measured figures that plans use, without spreads and drift.

    Args:
        before: the figures that plans used so far; None if there were none.
        found: all measurements so far.
    """
    old = before or Measurements(found.machine, slowdown=Contention(0.0, 0.0))
    calls = {}
    for name, each in found.calls.items():
        seconds = _figure(old.calls.get(name, Sample(NO_TIME)).seconds, each.seconds)
        calls[name] = Sample(Seconds(seconds), usual=each.usual)
    roofline = found.roofline
    if roofline is not None:
        flops, traffic, start = map(_figure, old.roofline or (0.0, 0.0, 0.0), roofline)
        roofline = Roofline(flops, traffic, Seconds(start))
    return Measurements(
        found.machine,
        calls,
        _settled_sizes(old.updates, found.updates),
        _settled_sizes(old.exchanges, found.exchanges),
        act=Seconds(_figure(old.act, found.act)),
        exchange=Seconds(_figure(old.exchange, found.exchange)),
        step=Seconds(_figure(old.step, found.step)),
        slowdown=Contention(*map(_figure, old.slowdown, found.slowdown)),
        memory=found.memory,
        roofline=roofline,
    )


def _figure(before: float, found: float) -> float:
    """The earlier figure where both are the same but for noise; else the new one, to two digits."""
    return before if before <= found * NOISE and found <= before * NOISE else float(f"{found:.2g}")


def _settled_sizes(before: Mapping[str, Sizes], found: Mapping[str, Sizes]) -> dict[str, Sizes]:
    made = {}
    for name, points in found.items():
        old = {each.bytes: each.seconds for each in before.get(name, ())}
        made[name] = tuple(
            SizedSample(each.bytes, Seconds(_figure(old.get(each.bytes, 0.0), each.seconds)))
            for each in points
        )
    return made


FORMAT = 3


def to_json(measured: Measurements) -> str:
    """The text of a file, readable: a call a line."""
    lines = [f'"weft measured costs": {FORMAT}']
    for name, part in vars(measured).items():
        if isinstance(part, Mapping):
            rows = (f" {json.dumps(key)}: {json.dumps(part[key])}" for key in sorted(part))
            text = "{\n" + ",\n".join(rows) + "\n}"
        else:
            text = json.dumps(part)
        lines.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def from_json(text: str, where: str) -> Measurements:
    """The figures of a file.

    Raises:
        UserError: it has another format or version; names the file.
    """
    try:
        content = json.loads(text)
        version = content.pop("weft measured costs")
        if version != FORMAT:
            raise wrong(f"{where}: the version of measured costs", str(FORMAT), version)
        found = read(Measurements, content, where)
        sizes = {**found.updates, **found.exchanges}
        for name, points in sizes.items():
            if any(one.bytes >= after.bytes for one, after in pairwise(points)):
                raise wrong(f"{where}: {name}", "in the order of sizes, each once", points)
    except UserError as error:
        raise UserError(f"{error}; run `weft measure` again") from None
    except UNREADABLE as error:
        raise UserError(
            f"{where}: no file of measured costs ({type(error).__name__}: {error}); run `weft measure` again"
        ) from None
    return found


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
        stands_in: the other set-up that the figures come from, if any; all costs are then estimates.
    """

    measured: Measurements
    usual: DefaultDevice
    stands_in: str = ""

    def like(self, rank: int) -> int:
        return 0

    def capacity(self, rank: int) -> Capacity:
        """The processor, its memory, how steady it is, what exchanges slow down, and the host's overhead for a step."""
        name = str(self.measured.machine.get("processor", "measured"))
        found = self.measured
        alone = found.machine.get(RANKS, 1) == 1
        return Capacity(
            *(name, {}, found.memory),
            slowdown=found.slowdown,
            drift=hypot(found.drift, _UNKNOWN_OF_ONE if alone else _UNKNOWN_OF_SEVERAL),
            step=found.step,
        )

    @cached_property
    def device(self) -> DefaultDevice:
        """The machine in a few figures: its roofline and its links, usual ones where they were not measured."""
        found = self.usual
        if self.measured.roofline is not None:
            found = replace(found, **self.measured.roofline._asdict())
        # The links as transfers between the most ranks show them.
        every = {
            name: points for name, points in self.measured.exchanges.items() if len(points) > 1
        }
        transfers = [every[name] for name in sorted(every, reverse=True) if "transfer" in name]
        if not transfers:
            return found
        first, last = transfers[0][0], transfers[0][-1]
        rate = (last.bytes - first.bytes) / max(last.seconds - first.seconds, 1e-9)
        return replace(found, link=rate, latency=first.seconds)

    def of_call(self, rank: int, call: OpCall, lies: Sequence[str] = ()) -> Cost:
        """The measured seconds; else in proportion to the nearest measured call of the op; else by the roofline."""
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
