"""The memory of a strategy is that of the rank with the least room, also where ranks have unlike limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import weft
from search.jobs import job
from weft.errors import UserError
from weft.planning.machine import Machine, machine_of, placement_on
from weft.planning.plans import plan_stored
from weft.search.measures import memory_of
from weft.units import Bytes

# Some 40 GiB and 16 GiB; both reserve as much.
TWO_KINDS = """
weft_topology: 1
name: two kinds
source: made up
nodes:
  - count: 1
    devices: {kind: a100-sxm-40gb, count: 1}
    ports:
      - {link: infiniband-hdr, count: 1}
  - count: 1
    devices: {kind: v100-sxm2-16gb, count: 1}
    ports:
      - {link: infiniband-edr, count: 1}
network:
  - {name: switch, latency_microseconds: 1}
"""
GIB = 2**30


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    (tmp_path / "t.yaml").write_text(TWO_KINDS)
    return machine_of(tmp_path / "t.yaml")


def held(*gib: float) -> dict[int, Bytes]:
    return {rank: Bytes(int(each * GIB)) for rank, each in enumerate(gib)}


def test_it_is_at_most_the_least_limit_where_all_have_room(machine: Machine) -> None:
    reserve, least = machine.costs.capacity(0).reserve, machine.limit_of(1)
    assert machine.least_limit == least < 20 * GIB < machine.limit_of(0)
    assert memory_of(held(4, 8), machine) == 8 * GIB + reserve
    # Nearly all of the larger device: more than the other one has, and yet there is room.
    assert memory_of(held(35, 8), machine) == least
    assert memory_of(held(35, 14), machine) == 14 * GIB + reserve
    for lacking in (held(41, 8), held(4, 17), held(35, 17)):
        assert memory_of(lacking, machine) > least


def test_a_limit_that_is_asked_for_is_that_of_each_rank(machine: Machine) -> None:
    limited, reserve = replace(machine, limit=8 * GIB), machine.costs.capacity(0).reserve
    assert memory_of(held(9, 5), limited) == 9 * GIB + reserve
    assert memory_of(held(3, 5), limited) == 5 * GIB + reserve
    assert limited.fingerprint != machine.fingerprint
    alike = machine_of("h100x2")
    assert replace(alike, limit=8 * GIB).fingerprint == alike.fingerprint


def test_no_rank_of_two_kinds_holds_more_than_the_limit(machine: Machine) -> None:
    """The first stage holds the most, on the device that has more room left than the other one."""
    step, fixed = job(512, 4).stored(), weft.Strategy(stages=2, grid=(2,))
    best = weft.search(step, machine, moves=1, fixed=fixed, planners=0).best
    ranks, kinds = placement_on(machine.device_type, 2, best), machine.kinds((0, 1))
    plans = plan_stored(step, best, ranks, kinds=kinds, costs=machine.planned)
    first, second = (peak.memory.peak for peak in plans.peaks)
    assert second < first
    limit = machine.costs.capacity(0).reserve + (first + second) // 2
    with pytest.raises(UserError, match=f"no strategy fits {limit} bytes"):
        weft.search(step, machine, moves=1, fixed=fixed, memory_limit=limit, planners=0)
