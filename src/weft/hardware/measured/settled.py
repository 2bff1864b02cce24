"""Settled figures: measurements as plans take them, which noise does not change.

A figure is rounded when it is first measured, and stays until one is measured that is further off than noise. So a
machine that is measured again gives the same plans, wherever its figures lie; rounding alone would change those that
lie near a border.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.hardware.costs import Slowdown
from weft.hardware.measured.figures import Measurements, Roofline, Sample, SizedSample
from weft.units import Seconds

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
