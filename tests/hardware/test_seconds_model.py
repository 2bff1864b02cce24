"""Cost models in seconds: proportions between work and communication are those of the machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.hardware import DefaultDevice, default_device
from weft.hardware.costs import seconds_model
from weft.units import Bytes, Flops, Seconds

DEVICE = DefaultDevice(1e12, 1e11, Seconds(0.0), 1e10, Seconds(1e-3))
RANKS = tuple(range(4))


def test_costs_are_seconds_in_one_unit() -> None:
    """A product, a sum, an all-reduce and a latency that take a second each on four ranks cost as much."""
    model = seconds_model(DEVICE, RANKS)
    # A rank that all-reduces a byte sends one by these costs; of an all-reduce 2·3 bytes cross for each.
    exchanged = model.boxing(Bytes(round(6 * DEVICE.link)), 0)
    assert model.work(Flops(4 * 10**12), Bytes(0)) == pytest.approx(exchanged, rel=1e-3)
    assert model.work(Flops(0), Bytes(4 * 10**11)) == pytest.approx(exchanged, rel=1e-3)
    assert model.boxing(Bytes(0), 1000) == pytest.approx(exchanged, rel=1e-3)


def test_faster_links_make_work_dearer() -> None:
    slow, quick = (seconds_model(replace(DEVICE, link=link), RANKS) for link in (1e9, 1e11))
    assert slow.bytes_per_flop < quick.bytes_per_flop
    assert slow.bytes_per_traffic < quick.bytes_per_traffic


def test_what_the_user_fixed_holds() -> None:
    assert seconds_model(default_device("cuda"), RANKS, "bfloat16").hints_hold
