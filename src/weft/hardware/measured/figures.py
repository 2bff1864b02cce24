"""Measurements: seconds of calls, updates, exchanges and acts, as they were measured on a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

from weft.errors import UserError
from weft.hardware.costs import NO_SLOWDOWN, Cost, Slowdown
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


@final
class Roofline(NamedTuple):
    """A rank's device as general calls show it, for calls that were not measured.

    Attributes:
        flops: floating-point operations a second, in float32.
        traffic: bytes a second that it reads and writes in its own memory.
        start: seconds that any call takes.
    """

    flops: float
    traffic: float
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
    updates: Mapping[str, tuple[SizedSample, ...]] = field(default_factory=dict)
    exchanges: Mapping[str, tuple[SizedSample, ...]] = field(default_factory=dict)
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
