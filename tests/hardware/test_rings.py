"""Rings and chains over the links of a node: complete, and no link is used twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware.machines import contents
from weft.hardware.rings import chain_flows, packed_rings, ring_flows
from weft.hardware.routes import NodeRoutes
from weft.hardware.topology_files import parse_topology, topology


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data(), contents())
def test_rings_pass_every_member_once(data, content):
    kind = parse_topology(content, "random").groups[0].kind
    members = tuple(sorted(data.draw(st.sets(st.integers(0, len(kind) - 1), min_size=1))))
    if len(members) < 2:
        return
    routes = NodeRoutes(kind)
    flows = ring_flows(routes, members)
    for side in (0, 1):
        shares: Any = Counter()
        for pair, share in flows.items():
            shares[pair[side]] += share
        assert dict(shares) == pytest.approx(dict.fromkeys(members, 1.0))
    # A chain brings everything down and up again: each way, every member but one end passes it on.
    assert sum(chain_flows(routes, members).values()) == pytest.approx(2 * (len(members) - 1))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data(), contents())
def test_packed_rings_share_no_link(data, content):
    kind = parse_topology(content, "random").groups[0].kind
    members = tuple(sorted(data.draw(st.sets(st.integers(0, len(kind) - 1), min_size=1))))
    widths: Any = Counter()
    for link in kind.links:
        widths[frozenset((link.source, link.target))] += int(link.width)
    used: Any = Counter()
    for ring in packed_rings(NodeRoutes(kind), members):
        assert sorted(ring) == list(members)
        turns = zip(ring, (*ring[1:], ring[0]), strict=True)
        # Two members go there and back over one link.
        used.update(
            {frozenset(pair) for pair in turns} if len(ring) == 2 else map(frozenset, turns)
        )
    assert all(used[pair] <= widths[pair] for pair in used)


@pytest.mark.parametrize(
    ("ranks", "count"), [(2, 1), (3, 1), (4, 2), (5, 0), (6, 1), (7, 2), (8, 3)]
)
def test_as_many_as_a_cube_mesh_has(ranks, count):
    routes = NodeRoutes(topology("v100").groups[0].kind)
    assert len(packed_rings(routes, tuple(range(ranks)))) == count


def test_a_switch_has_no_direct_links():
    routes = NodeRoutes(topology("h100").groups[0].kind)
    assert packed_rings(routes, tuple(range(8))) == []
