"""Seconds of collectives and transfers on machines that can be worked out by hand."""

from __future__ import annotations

import pytest
import yaml

from weft.errors import UserError
from weft.hardware.collectives import collective_seconds, transfer_seconds
from weft.hardware.topology_files import TOPOLOGIES, parse_topology, topology
from weft.units import Bytes

SIZE = Bytes(1 << 30)


def machine(nodes, links=None, network=None):
    content = {
        "weft_topology": 1,
        "name": "by hand",
        "links": links or {"fast": {"gb_per_second": 100}, "card": {"gb_per_second": 10}},
        "nodes": nodes,
        "network": network or [{"name": "top"}],
    }
    return parse_topology(content, "by hand")


def switched(count, devices, cards):
    return [
        {
            "count": count,
            "devices": {"kind": "cpu", "count": devices},
            "switches": [{"name": "s", "link": "fast", "joins": "devices"}],
            "ports": [{"link": "card", "count": cards}],
        }
    ]


def busy(found, size=SIZE):
    """Seconds for each 10^9 bytes."""
    return found / size * 1e9


def test_a_ring_on_a_switch():
    found = collective_seconds(machine(switched(1, 8, 1)), "all_reduce", SIZE, [range(8)])
    assert busy(found) == pytest.approx(2 * 7 / 8 / 100)


@pytest.mark.parametrize(("nodes", "cards"), [(2, 8), (2, 2), (3, 8), (3, 1)])
def test_nodes_with_cards(nodes, cards):
    """The cheapest of three algorithms; the rates of links are 100, those of cards 10."""
    found = collective_seconds(
        machine(switched(nodes, 8, cards)), "all_reduce", SIZE, [range(8 * nodes)]
    )
    within, around = 2 * 7 / 8 / 100, 2 * (8 * nodes - 1) / (8 * nodes)
    # A ring takes turns at the border: every card carries its part of what crosses.
    ring = max(around * 7 / 8 / 100, around / (10 * cards))
    # Chains within and two trees across. Two nodes: each sends its half up and the other half down.
    # Of three, one gets halves from two children and sends both on.
    tree = max(within, {2: 1, 3: 1.5}[nodes] / (10 * cards))
    # Reduced within, an eighth across by each device, gathered within.
    across = 2 * (nodes - 1) / nodes / (10 * cards)
    assert busy(found) == pytest.approx(min(ring, tree, within + across))


def test_a_ring_is_cut_where_it_leaves_a_node():
    """Two nodes of two devices: of a node's two links one carries a turn of the ring, in half of the turns each."""
    links = {"fast": {"gb_per_second": 10}, "card": {"gb_per_second": 100}}
    found = collective_seconds(
        machine(switched(2, 2, 2), links), "reduce_scatter", SIZE, [range(4)]
    )
    assert busy(found) == pytest.approx(3 / 4 / 2 / 10)


def test_a_shared_card_is_shared():
    one, eight = machine(switched(2, 8, 1)), machine(switched(2, 8, 8))
    pairs = [(device, device + 8) for device in range(8)]
    shared = collective_seconds(one, "all_reduce", SIZE, pairs)
    assert shared == pytest.approx(8 * collective_seconds(eight, "all_reduce", SIZE, pairs))
    assert shared == pytest.approx(8 * collective_seconds(one, "all_reduce", SIZE, pairs[:1]))


def test_it_depends_on_ranks_in_a_node():
    whole = topology("h100x64")
    inside, across = range(8), range(0, 64, 8)
    assert collective_seconds(whole, "all_reduce", SIZE, [inside]) < 0.25 * collective_seconds(
        whole, "all_reduce", SIZE, [across]
    )


@pytest.mark.parametrize(
    ("ranks", "links"),
    [(2, 1), (3, 2), (4, 4), (6, 2), (7, 4), (8, 6)],
)
def test_rings_of_a_cube_mesh(ranks, links):
    """As many rings as can be laid over a DGX-1's links, both ways round; busbw as NCCL counts it."""
    ideal = {"nvlink2": {"gb_per_second": 25}, "pcie3-x16": {"gb_per_second": 1}}
    content = cube(ideal)
    found = collective_seconds(parse_topology(content, "cube"), "all_reduce", SIZE, [range(ranks)])
    assert 2 * (ranks - 1) / ranks / busy(found) == pytest.approx(25 * links)


def test_five_of_a_cube_mesh_have_no_ring():
    """The fifth device has links to one of the four only: two chains, up and down."""
    ideal = {"nvlink2": {"gb_per_second": 25}, "pcie3-x16": {"gb_per_second": 1}}
    found = collective_seconds(parse_topology(cube(ideal), "cube"), "all_reduce", SIZE, [range(5)])
    assert busy(found) == pytest.approx(1 / (2 * 25))


def cube(links):
    return {**yaml.safe_load((TOPOLOGIES / "v100.yaml").read_text()), "links": links}


def test_oversubscription_counts_where_groups_cross():
    nodes = switched(4, 1, 1)
    network = [{"name": "leaf", "nodes": 2, "oversubscription": 4}, {"name": "top"}]
    whole = machine(nodes, network=network)
    near = [(0, 1), (2, 3)]
    far = [(0, 2), (1, 3)]
    times = collective_seconds(whole, "all_gather", SIZE, far) / collective_seconds(
        whole, "all_gather", SIZE, near
    )
    assert times == pytest.approx(4)


def test_latency_rules_small_sizes_and_trees_serve_many_ranks():
    links = {
        "fast": {"gb_per_second": 100},
        "card": {"gb_per_second": 10, "protocols": {"any": {"hop_microseconds": 10}}},
    }
    whole = machine(switched(64, 1, 1), links)
    small = collective_seconds(whole, "all_reduce", Bytes(4), [range(64)])
    # Six levels of a tree up and down, not 126 hops around.
    assert small == pytest.approx(2 * 6 * 10e-6, rel=1e-3)


def test_the_quickest_protocol_counts():
    protocols = {
        "quick": {"hop_microseconds": 1, "share": 0.25},
        "wide": {"hop_microseconds": 50, "share": 1.0},
    }
    links = {"fast": {"gb_per_second": 100, "protocols": protocols}, "card": {"gb_per_second": 1}}
    whole = machine(switched(1, 2, 1), links)
    hops = collective_seconds(whole, "all_reduce", Bytes(8), [(0, 1)])
    assert hops == pytest.approx(2 * 1e-6, rel=0.01)
    assert busy(collective_seconds(whole, "all_reduce", SIZE, [(0, 1)])) == pytest.approx(
        1 / 100, rel=0.05
    )


def test_a_switch_that_adds_up():
    """Each device sends its own and its part of the sum, where a ring sends nearly twice its own."""
    fast = {"gb_per_second": 100, "in_switch": {"base_microseconds": 25, "share": 0.8}}
    links = {"fast": fast, "card": {"gb_per_second": 10}}
    whole, plain = machine(switched(2, 8, 8), links), machine(switched(2, 8, 8))
    found = collective_seconds(whole, "all_reduce", SIZE, [range(8)])
    assert busy(found - 25e-6) == pytest.approx((1 + 1 / 8) / (0.8 * 100))
    # A ring scatters sooner, as does what waits for no more than a ring of little.
    for kind in ("reduce_scatter", "all_gather", "all_to_all"):
        expected = collective_seconds(plain, kind, SIZE, [range(8)])
        assert collective_seconds(whole, kind, SIZE, [range(8)]) == expected
    small = collective_seconds(whole, "all_reduce", Bytes(8), [range(8)])
    assert small == collective_seconds(plain, "all_reduce", Bytes(8), [range(8)])
    # Over several nodes no switch has all.
    far = collective_seconds(whole, "all_reduce", SIZE, [range(16)])
    assert far == collective_seconds(plain, "all_reduce", SIZE, [range(16)])


def test_all_reduces_of_h100_reach_what_is_published():
    """475 GB/s as NCCL counts a bus, for sizes at which nothing waits (SimAI)."""
    found = collective_seconds(topology("h100"), "all_reduce", SIZE, [range(8)])
    assert 2 * 7 / 8 / busy(found) == pytest.approx(475, rel=0.02)


def test_transfers():
    whole = machine(switched(2, 2, 1))
    assert transfer_seconds(whole, []) == 0
    assert transfer_seconds(whole, [(1, 1, SIZE)]) == 0
    assert busy(transfer_seconds(whole, [(0, 1, SIZE)])) == pytest.approx(1 / 100)
    # Both devices of a node send over its one card; the other direction is free.
    assert busy(transfer_seconds(whole, [(0, 2, SIZE), (1, 3, SIZE)])) == pytest.approx(2 / 10)
    assert busy(transfer_seconds(whole, [(0, 2, SIZE), (3, 1, SIZE)])) == pytest.approx(1 / 10)


def test_small_groups_take_no_time():
    whole = machine(switched(1, 2, 1))
    assert collective_seconds(whole, "all_reduce", SIZE, []) == 0
    assert collective_seconds(whole, "all_reduce", SIZE, [[1], []]) == 0
    assert collective_seconds(whole, "all_reduce", Bytes(0), [[0, 1]]) == 0


def test_bad_groups():
    whole = machine(switched(1, 2, 1))
    with pytest.raises(UserError, match="device 2 is not one of the topology by hand"):
        collective_seconds(whole, "all_reduce", SIZE, [[0, 2]])
    with pytest.raises(UserError, match="got 1 twice"):
        collective_seconds(whole, "all_reduce", SIZE, [[1, 1]])
    with pytest.raises(UserError, match="has devices 0 to 1"):
        transfer_seconds(whole, [(0, -1, SIZE)])


def test_sixteen_thousand_devices():
    """Routes are computed from places: no graph of devices, and loads of a family once."""
    whole = topology("h100x16384")
    across = [range(first, 16384, 128) for first in range(128)]
    found = collective_seconds(whole, "reduce_scatter", SIZE, across)
    # Eight groups to a card of 48.5 GB/s at most: two of a node's sixteen places share one.
    assert busy(found) >= 127 / 128 / 50
