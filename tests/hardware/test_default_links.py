"""Measured links become usual ones, so that noise changes no plan."""

from __future__ import annotations

import pytest

from weft.hardware import default_device, linked, links_text
from weft.hardware.planning_costs import bucket_bytes
from weft.units import Seconds

CPU = default_device("cpu")


@pytest.mark.parametrize(
    ("bytes_per_second", "latency", "text"),
    [
        (1.17e8, 1.4e-4, "1 Gbit/s, 0.1 ms"),
        (0.9e8, 0.7e-4, "1 Gbit/s, 0.1 ms"),
        (8e8, 3e-4, "10 Gbit/s, 0.5 ms"),
        (2.2e9, 1.5e-5, "25 Gbit/s, 0.02 ms"),
        (1e20, 0.0, "400 Gbit/s, 0.02 ms"),
    ],
)
def test_the_nearest_kind(bytes_per_second: float, latency: float, text: str) -> None:
    assert links_text(linked(CPU, bytes_per_second, Seconds(latency))) == text


def test_slow_links_have_small_buckets() -> None:
    slow = linked(CPU, 1.2e8, Seconds(1e-4))
    assert (slow.flops, slow.traffic) == (CPU.flops, CPU.traffic)
    assert bucket_bytes(slow, (0, 1)) < bucket_bytes(CPU, (0, 1)) / 4
