"""Routes of a whole topology: computed from places, equal to those walked step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.machines import machines
from weft.hardware.routes import Network, NodeRoutes
from weft.hardware.topology_files import parse_topology, topology
from weft.units import Seconds

QUICK = settings(max_examples=40, deadline=None, derandomize=True)


@QUICK
@given(machines())
def test_places(machine):
    network = Network(machine)
    for device in range(len(machine)):
        assert network.node[device] == machine.node(device)
    assert len(network.node) == sum(len(group.kind) * group.count for group in machine.groups)


@QUICK
@given(st.data(), machines())
def test_no_two_devices_of_different_units_have_a_resource(data, machine):
    if not machine.levels:
        return
    network = Network(machine)
    device = st.integers(0, len(machine) - 1)
    some, other = data.draw(device), data.draw(device)
    sides = []
    for one in (some, other):
        found = set()
        for ways in (network.out, network.into):
            found |= set(ways.of(np.array([one]))[0].tolist())
        sides.append(found)
    if network.unit[some] != network.unit[other]:
        assert not sides[0] & sides[1]
    assert max(map(max, sides)) < network.inverse.shape[1]


def test_levels_meet_where_groups_do():
    whole = topology("selenex3072")
    network = Network(whole)
    units = np.array([0, 0, 0, 0])
    others = np.array([0, 19, 20, 140])
    assert network.meeting(units, others).tolist() == [0, 1, 2, 3]
    assert network.level_waits.tolist() == pytest.approx([0, 0.3e-6, 0.9e-6, 1.5e-6])
    # Uplinks of a level lie behind those of the level below, and differ by direction.
    found = [
        network.uplink(level, np.array([383]), down) for level in (1, 2) for down in (False, True)
    ]
    assert len({int(one[0]) for one in found}) == 4
    assert max(int(one[0]) for one in found) < network.inverse.shape[1]


def test_pairs_share_a_card_and_it_is_the_nearest():
    routes = NodeRoutes(topology("v100").groups[0].kind)
    cards = [routes.out(device).resources[-1] for device in range(8)]
    assert cards == [cards[0], cards[0], cards[2], cards[2], cards[4], cards[4], cards[6], cards[6]]
    assert len(set(cards)) == 4
    assert [link.name for link in routes.out(0).links] == ["pcie3-x16", "infiniband-edr"]
    assert [link.name for link in routes.into(0).links] == ["infiniband-edr", "pcie3-x16"]


def test_ways_are_the_quickest():
    routes = NodeRoutes(topology("v100").groups[0].kind)
    direct, far = routes.route(0, 3), routes.route(0, 5)
    assert [link.name for link in direct.links] == ["nvlink2"]
    # No link leads from 0 to 5, and devices pass nothing on.
    assert [link.name for link in far.links] == [
        *("pcie3-x16", "pcie3-x16", "qpi", "pcie3-x16", "pcie3-x16")
    ]


def test_links_of_one_way_and_shared_ones():
    content = {
        "weft_topology": 1,
        "name": "shared",
        "links": {"bus": {"gb_per_second": 8, "latency_microseconds": 2}},
        "nodes": [
            {
                "devices": {"kind": "cpu", "count": 2},
                "switches": [{"name": "s"}],
                "links": [
                    {"between": ["device0", "s"], "link": "bus", "shared": "host"},
                    {"between": ["device1", "s"], "link": "bus", "shared": "host"},
                    {"between": ["device1", "device0"], "link": "bus", "one_way": True, "width": 2},
                ],
            }
        ],
    }
    routes = NodeRoutes(parse_topology(content, "shared").groups[0].kind)
    assert len(routes.capacities) == 3
    assert routes.route(0, 1).resources == (0, 1)
    assert routes.route(1, 0).resources == (2,)
    assert routes.route(0, 1).latency == pytest.approx(Seconds(4e-6))
    assert routes.capacities[2][1] == 16e9
