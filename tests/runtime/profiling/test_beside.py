"""Calls beside exchanges: what they lose, said as a slow-down."""

from __future__ import annotations

import pytest

import weft
from weft.ir.plan import Communicator
from weft.runtime.profiling import exchange_times
from weft.runtime.profiling.exchange_times import contention, times_as_long


def test_what_gets_a_part_takes_longer() -> None:
    assert times_as_long(1.0) == 1.0
    assert times_as_long(1.2) == 1.0  # noise
    assert times_as_long(0.5) == 2.0
    assert times_as_long(0.0) == pytest.approx(20.0)  # it stands still, nearly


def test_it_is_measured_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_times, "_TIMES", 2)
    with weft.local_world(2) as world:
        channels = world.connect([Communicator(0, (0, 1))])
        found = world.run(lambda rank: contention(channels[rank][0]))
        assert all(each >= 1.0 for both in found for each in both)
        assert all(channels[rank][0].spins for rank in world.ranks)
