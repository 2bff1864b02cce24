"""Invariants of the costs of communication, over random machines: what others' cost models break."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.machines import families, machines
from weft.hardware.collectives import (
    CollectiveLinks,
    TransferLinks,
    collective_seconds,
    transfer_seconds,
)
from weft.hardware.routes import Network
from weft.hardware.topology import Topology
from weft.hardware.topology_files import parse_topology
from weft.ir.plan_nodes import COLLECTIVE_KINDS
from weft.units import Bytes

SIZES = st.sampled_from([Bytes(8 * 2**power + power) for power in range(0, 31, 3)])
QUICK = settings(max_examples=40, deadline=None, derandomize=True)


@QUICK
@given(st.data(), machines(), SIZES, SIZES)
def test_more_bytes_never_take_less(data, machine, some, more):
    groups = data.draw(families(machine))
    for kind in COLLECTIVE_KINDS:
        less = collective_seconds(machine, kind, min(some, more), groups)
        assert 0 <= less <= collective_seconds(machine, kind, max(some, more), groups)


@QUICK
@given(st.data(), machines(), SIZES)
def test_an_all_reduce_lies_between_its_halves(data, machine, size):
    groups = data.draw(families(machine))
    whole, scatter, gather = (
        collective_seconds(machine, kind, size, groups)
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert scatter == gather
    assert scatter <= whole <= (scatter + gather) * (1 + 1e-12)


@QUICK
@given(st.data(), machines(), SIZES)
def test_order_in_groups_and_of_groups_changes_nothing(data, machine, size):
    groups = data.draw(families(machine))
    shuffled = [data.draw(st.permutations(group)) for group in data.draw(st.permutations(groups))]
    for kind in COLLECTIVE_KINDS:
        expected = collective_seconds(machine, kind, size, groups)
        assert collective_seconds(machine, kind, size, shuffled) == pytest.approx(expected)


@QUICK
@given(st.data(), machines(flat=True), SIZES)
def test_equal_nodes_may_change_places(data, machine, size):
    groups = data.draw(families(machine))
    first = 0
    renamed = {}
    for group in machine.groups:
        order = data.draw(st.permutations(range(group.count)))
        many = len(group.kind)
        for node, local in product(range(group.count), range(many)):
            renamed[first + node * many + local] = first + order[node] * many + local
        first += group.count * many
    moved = [[renamed[device] for device in group] for group in groups]
    # A ring over nodes of several kinds crosses other pairs of them; within one kind nothing changes.
    kinds = ("all_to_all",) if len(machine.groups) > 1 else COLLECTIVE_KINDS
    for kind in kinds:
        expected = collective_seconds(machine, kind, size, groups)
        assert collective_seconds(machine, kind, size, moved) == pytest.approx(expected)


@QUICK
@given(st.data(), machines(), SIZES)
def test_others_at_the_same_time_never_help(data, machine, size):
    groups = data.draw(families(machine))
    for kind in COLLECTIVE_KINDS:
        together = collective_seconds(machine, kind, size, groups)
        alone = max(collective_seconds(machine, kind, size, [group]) for group in groups)
        assert alone <= together * (1 + 1e-9)


@QUICK
@given(st.data(), machines(), SIZES)
def test_nothing_is_quicker_than_the_links(data, machine, size):
    """A reduce-scatter of n ranks sends (n - 1) times the bytes at least, an all-reduce twice that (Patarasuk and
    Yuan 2009, theorem 1), but where a switch adds up; and a node's part of it crosses the node's ports.
    """
    groups = data.draw(families(machine))
    network = Network(machine)
    for group in groups:
        ranks = len(group)
        rate = sum(outwards(network, device) for device in group)
        least = (ranks - 1) * size / rate
        twice = 1 if any(link.in_switch for link in machine.link_kinds) else 2
        for kind, times in (("all_reduce", twice), ("reduce_scatter", 1), ("all_to_all", 1)):
            assert collective_seconds(machine, kind, size, [group]) >= times * least * (1 - 1e-9)
        inside = Counter(network.unit[device] for device in group)
        for unit, members in inside.items() if len(inside) > 1 else ():
            ports = machine.groups[network.group[unit]].kind.ports
            border = size * (ranks - members) / ranks / sum(port.rate for port in ports)
            for kind in ("all_reduce", "reduce_scatter"):
                found = collective_seconds(machine, kind, size, [group])
                assert found >= border * (1 - 1e-9)


def outwards(network, device):
    """All that a device can send, in bytes a second."""
    kind = network.topology.groups[network.group[network.unit[device]]].kind
    local = int(network.local[device])
    inner = sum(link.rate for link in kind.links if local in (link.source, link.target))
    return inner + sum(port.rate for port in kind.ports)


@QUICK
@given(st.data(), machines(ideal=True), SIZES)
def test_an_all_to_all_is_its_pieces(data, machine, size):
    """The loads that are counted group by group are those of all pairs, one by one."""
    groups = data.draw(families(machine))
    # Pieces of whole bytes.
    most = max(map(len, groups))
    whole = Bytes(size * most)
    pieces = [
        (source, target, Bytes(size * most // len(group)))
        for group in groups
        for source, target in product(group, group)
    ]
    if any(most % len(group) for group in groups):
        return
    direct = transfer_seconds(machine, pieces)
    assert collective_seconds(machine, "all_to_all", whole, groups) <= direct * (1 + 1e-9)
    if all(len({machine.node(device) for device in group}) in (1, len(group)) for group in groups):
        assert collective_seconds(machine, "all_to_all", whole, groups) == pytest.approx(direct)


@QUICK
@given(st.data(), machines(), SIZES, SIZES)
def test_transfers_grow_and_stay_below_the_links(data, machine, some, more):
    device = st.integers(0, len(machine) - 1)
    pairs = data.draw(st.lists(st.tuples(device, device), min_size=1, max_size=6))
    less, larger = (
        transfer_seconds(machine, [(source, target, size) for source, target in pairs])
        for size in sorted((some, more))
    )
    assert less <= larger
    network = Network(machine)
    for source, target in pairs:
        if source != target:
            assert larger >= max(some, more) / outwards(network, source)


def named(devices: int, nodes: int, form: str) -> Topology:
    """So many nodes of so many devices: on a switch of fast links, or pairs on fast ones below a slow switch."""
    names = [f"device{place}" for place in range(devices)]
    switches: list[dict[str, Any]] = [{"name": "s", "link": "fast", "joins": "devices"}]
    if form == "two kinds":
        pairs = [names[place : place + 2] for place in range(0, devices, 2)]
        switches = [
            {"name": f"p{n}", "link": "fast", "joins": pair} for n, pair in enumerate(pairs)
        ]
        joins = [f"p{n}" for n in range(len(pairs))]
        switches.append({"name": "s", "link": "slow", "joins": joins})
    slow = {"hop_microseconds": 5, "share": 0.9}
    content = {
        "weft_topology": 1,
        "name": form,
        "links": {
            "fast": {"gb_per_second": 100, "protocols": {"any": {"hop_microseconds": 1}}},
            "slow": {"gb_per_second": 5, "protocols": {"any": slow}},
        },
        "nodes": [
            {
                "count": nodes,
                "devices": {"kind": "cpu", "count": devices},
                "switches": switches,
                "ports": [{"link": "slow", "count": 1}],
            }
        ],
        "network": [{"name": "top", "latency_microseconds": 1}],
    }
    return parse_topology(content, form)


@pytest.mark.parametrize(
    ("devices", "nodes", "form"), [(1, 8, "one"), (5, 3, "one"), (5, 3, "two kinds")]
)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.data(), SIZES)
def test_machines_that_others_get_wrong(devices, nodes, form, data, size):
    """One device a node, three nodes of five, two kinds of links in a node."""
    machine = named(devices, nodes, form)
    groups = data.draw(families(machine))
    whole, scatter, gather = (
        collective_seconds(machine, kind, size, groups)
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert scatter <= whole <= (scatter + gather) * (1 + 1e-12)
    assert whole <= collective_seconds(machine, "all_reduce", Bytes(2 * size), groups)
    # A whole node: within it, or over as many nodes, with the same number of ranks.
    ranks = min(devices, nodes)
    inside = [list(range(ranks))]
    across = [list(range(0, ranks * devices, devices))]
    for kind in COLLECTIVE_KINDS if ranks > 1 else ():
        within = collective_seconds(machine, kind, size, inside)
        assert within < collective_seconds(machine, kind, size, across)


@QUICK
@given(st.data(), machines(), SIZES)
def test_links_are_needed_no_longer_than_a_communication_lasts(data, machine, size):
    groups = data.draw(families(machine))
    device = st.integers(0, len(machine) - 1)
    pieces = [
        (source, target, size)
        for source, target in data.draw(st.lists(st.tuples(device, device), max_size=4))
    ]
    every = [(TransferLinks(machine, pieces).busy(), transfer_seconds(machine, pieces))]
    every += [
        (
            CollectiveLinks(machine, kind, size, groups).busy(),
            collective_seconds(machine, kind, size, groups),
        )
        for kind in COLLECTIVE_KINDS
    ]
    for (resources, busy), seconds in every:
        assert len(set(resources.tolist())) == len(resources)
        assert all(0 < each <= seconds * (1 + 1e-9) for each in busy.tolist())
    crossing = any(len(group) > 1 for group in groups)
    assert all((len(resources) > 0) == crossing for (resources, _), _ in every[1:])


@QUICK
@given(st.data(), machines(ideal=True), SIZES)
def test_without_latency_some_link_is_needed_all_the_time(data, machine, size):
    group = data.draw(families(machine))[0]
    for kind in ("reduce_scatter", "all_to_all") if len(group) > 1 else ():
        seconds = collective_seconds(machine, kind, size, [group])
        # What works within nodes and then across them needs each of both for a part of the time.
        busy = CollectiveLinks(machine, kind, size, (group,)).busy().seconds
        assert seconds / 2 <= busy.max() * (1 + 1e-9)
    source, target = group[0], group[-1]
    links = TransferLinks(machine, ((source, target, size),)).busy()
    if source != target:
        seconds = transfer_seconds(machine, [(source, target, size)])
        assert links.seconds.max() == pytest.approx(seconds)
