"""Measurements: seconds of calls, updates, exchanges and acts, as they were measured on a machine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, TypeAlias, final

from weft.errors import UNREADABLE, UserError, wrong
from weft.hardware.costs import NO_SLOWDOWN, Cost, Slowdown
from weft.schema import Entries, Number, read
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


Sizes: TypeAlias = Annotated[tuple[SizedSample, ...], Entries(1)]


@final
class Roofline(NamedTuple):
    """A rank's device as general calls show it, for calls that were not measured.

    Attributes:
        flops: floating-point operations a second, in float32.
        traffic: bytes a second that it reads and writes in its own memory.
        start: seconds that any call takes.
    """

    flops: Annotated[float, Number(above=0)]
    traffic: Annotated[float, Number(above=0)]
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

    machine: Mapping[str, str | int]
    calls: Mapping[str, Sample] = field(default_factory=dict)
    updates: Mapping[str, Sizes] = field(default_factory=dict)
    exchanges: Mapping[str, Sizes] = field(default_factory=dict)
    act: Seconds = NO_TIME
    exchange: Seconds = NO_TIME
    step: Seconds = NO_TIME
    slowdown: Slowdown = NO_SLOWDOWN
    drift: float = 0.0
    memory: Bytes | None = None
    roofline: Roofline | None = None

    def joined(self, other: Measurements) -> Measurements:
        """These and later ones of the same machine, which count where both have a figure.

        Slowdown and drift are always the later ones'.

        Raises:
            UserError: when the machines differ.
        """
        if dict(self.machine) != dict(other.machine):
            raise UserError(
                f"measured on {_words(self.machine)}, not on {_words(other.machine)}; run `weft measure` here"
            )
        return Measurements(
            self.machine,
            {**self.calls, **other.calls},
            {**self.updates, **other.updates},
            {**self.exchanges, **other.exchanges},
            act=other.act or self.act,
            exchange=other.exchange or self.exchange,
            step=other.step or self.step,
            slowdown=other.slowdown,
            drift=other.drift,
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


def _words(machine: Mapping[str, str | int]) -> str:
    return ", ".join(f"{key} {each}" for key, each in machine.items())


# Settled figures: measurements as plans take them, which noise does not change.
#
# A figure is rounded when it is first measured, and stays until one is measured that is further off than noise. So a
# machine that is measured again gives the same plans, wherever its figures lie; rounding alone would change those that
# lie near a border.


# Figures apart by no more than this factor are the same but for noise: twice 10 %, and what rounding adds.
NOISE = 1.3


def settled(before: Measurements | None, found: Measurements) -> Measurements:
    """The figures that plans take of what was measured, without spreads and drift, which no plan reads.

    Args:
        before: that they took so far; None where there were none.
        found: all that is measured by now.
    """
    old = before or Measurements(found.machine)
    return Measurements(
        found.machine,
        {name: _sample(old.calls.get(name), each) for name, each in found.calls.items()},
        _every_size(old.updates, found.updates),
        _every_size(old.exchanges, found.exchanges),
        act=Seconds(_figure(old.act, found.act)),
        exchange=Seconds(_figure(old.exchange, found.exchange)),
        step=Seconds(_figure(old.step, found.step)),
        slowdown=Slowdown(*map(_figure, before.slowdown if before else (0.0, 0.0), found.slowdown)),
        memory=found.memory,
        roofline=_roofline(old.roofline, found.roofline),
    )


def _figure(before: float, found: float) -> float:
    """The earlier figure where both are the same but for noise; else the new one, to two digits."""
    return before if before <= found * NOISE and found <= before * NOISE else float(f"{found:.2g}")


def _sample(before: Sample | None, found: Sample) -> Sample:
    seconds = _figure(0.0 if before is None else before.seconds, found.seconds)
    return Sample(Seconds(seconds), usual=found.usual)


def _every_size(
    before: Mapping[str, Sequence[SizedSample]], found: Mapping[str, Sequence[SizedSample]]
) -> dict[str, tuple[SizedSample, ...]]:
    return {name: _sizes(before.get(name, ()), each) for name, each in found.items()}


def _sizes(before: Sequence[SizedSample], found: Sequence[SizedSample]) -> tuple[SizedSample, ...]:
    old = {each.bytes: each.seconds for each in before}
    return tuple(
        SizedSample(each.bytes, Seconds(_figure(old.get(each.bytes, 0.0), each.seconds)))
        for each in found
    )


def _roofline(before: Roofline | None, found: Roofline | None) -> Roofline | None:
    if found is None:
        return None
    flops, traffic, start = map(_figure, before or (0.0, 0.0, 0.0), found)
    return Roofline(flops, traffic, Seconds(start))


FORMAT = 3


def to_json(measured: Measurements) -> str:
    """The text of a file, readable: a call a line."""
    parts: dict[str, Mapping[str, object] | object] = {
        "weft measured costs": FORMAT,
        "machine": measured.machine,
        "act": measured.act,
        "exchange": measured.exchange,
        "step": measured.step,
        "slowdown": measured.slowdown,
        "drift": measured.drift,
        "memory": measured.memory,
        "roofline": measured.roofline,
        "exchanges": measured.exchanges,
        "updates": measured.updates,
        "calls": dict(sorted(measured.calls.items())),
    }
    lines = (f"{json.dumps(name)}: {_lines(part)}" for name, part in parts.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(part: object) -> str:
    if not isinstance(part, Mapping):
        return json.dumps(part)
    return "{\n" + ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in part.items()) + "\n}"


def from_json(text: str, where: str) -> Measurements:
    """The figures of a file.

    Raises:
        UserError: it is none of these, or of another version; names the file.
    """
    try:
        content = json.loads(text)
        version = content.pop("weft measured costs")
        if version != FORMAT:
            raise wrong(f"{where}: the version of measured costs", str(FORMAT), version)
        found = read(Measurements, content, where)
        sizes = {**found.updates, **found.exchanges}
        for name, points in sizes.items():
            if len({each.bytes for each in points}) < len(points):
                raise wrong(f"{where}: {name}", "each size once", points)
    except UserError as error:
        raise UserError(f"{error}; run `weft measure` again") from None
    except UNREADABLE as error:
        raise UserError(
            f"{where}: no file of measured costs ({type(error).__name__}: {error}); run `weft measure` again"
        ) from None
    return found
