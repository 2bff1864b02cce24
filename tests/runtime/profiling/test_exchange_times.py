"""Seconds of exchanges: of the usual sizes, and of what programs send at once."""

from __future__ import annotations

from collections import defaultdict

import pytest

from weft.ir.plan import COLLECTIVE_KINDS, Communicator
from weft.runtime.profiling import exchange_times
from weft.runtime.profiling.exchange_times import SIZES, measured_exchanges
from weft.runtime.world.world import local_world
from weft.units import NO_BYTES, Bytes


@pytest.mark.parametrize(
    ("largest", "last"), [(NO_BYTES, 64), (Bytes(64), 64), (Bytes(100), 100), (Bytes(10**12), 256)]
)
def test_what_programs_send_at_once_is_measured_as_it_is(
    largest: Bytes, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_times, "SIZES", SIZES[:1])
    monkeypatch.setattr(exchange_times, "MOST", Bytes(256))
    monkeypatch.setattr(exchange_times, "_TRIES", {True: 3, False: 3})
    with local_world(2) as world:
        channels = world.connect([Communicator(0, (0, 1))])
        found, _ = world.run(
            lambda rank: measured_exchanges(channels[rank][0], largest={"all_reduce": largest})
        )
    assert found["all_reduce of 2"][-1].bytes == last
    assert found["all_gather of 2"][-1].bytes == 64


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_measure_the_same_and_a_transfer_goes_one_way(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_times, "SIZES", SIZES[:2])
    monkeypatch.setattr(exchange_times, "_TRIES", {True: 3, False: 3})
    begun: defaultdict[int, list[str]] = defaultdict(list)
    with local_world(size, timeout=20) as world:
        channels = world.connect((Communicator(0, tuple(range(size))),))
        found = world.run(lambda rank: measured_exchanges(channels[rank][0], begun[rank].append))
        sent = [channels[rank][0].sent.total() for rank in range(size)]
    assert all(each == found[0] for each in found)
    assert all(own == list(found[0]) for own in begun.values())
    assert len(found[0]) == len(COLLECTIVE_KINDS) + (size == 2)
    assert (max(sent) > min(sent) + SIZES[1]) == (size == 2)
