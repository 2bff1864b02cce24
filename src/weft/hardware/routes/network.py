"""Network: the resources of a whole topology in arrays, and what bytes between nodes cross."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from weft.cached import cached_property
from weft.hardware.routes.node_routes import NodeRoutes, Route
from weft.hardware.topology.machine import LinkKind, NodeGroup, Topology, common_protocols

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


@final
@dataclass(frozen=True)
class PortRoutes:
    """The ways of all devices into the network, or back, one behind the other.

    Attributes:
        begin: of each device, its place in `resources`, and the end.
        resources: numbers, over the whole topology.
    """

    begin: Ints
    resources: Ints

    def of(self, devices: Ints) -> tuple[Ints, Ints]:
        """The resources that devices cross, and of each, the place in `devices`."""
        counts = self.begin[devices + 1] - self.begin[devices]
        place = np.repeat(np.arange(len(devices)), counts)
        within = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
        return self.resources[self.begin[devices][place] + within], place


@final
class Network:
    """The resources of a topology, and which of them bytes cross.

    A unit is one node of a group, or a whole machine that is one graph.

    Attributes:
        protocols: names of those that every kind of link has.
        routes: of each group of nodes.
        unit: of each device, its unit's number.
        group: of each unit, its group's number.
        local: of each device, its number within the unit.
        base: of each unit, its first resource.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.protocols = common_protocols(topology.link_kinds)
        self.routes = [NodeRoutes(group.kind) for group in topology.groups]
        counts = [group.count for group in topology.groups]
        self.group = np.repeat(np.arange(len(counts)), counts)
        sizes = np.array([len(group.kind) for group in topology.groups])[self.group]
        first = np.cumsum(sizes) - sizes
        self.unit = np.repeat(np.arange(len(sizes)), sizes)
        self.local = np.arange(len(self.unit)) - first[self.unit]
        held = np.array([len(routes.capacities) for routes in self.routes])[self.group]
        self.base = np.cumsum(held) - held
        self._in_nodes = int(held.sum())

    @cached_property
    def node(self) -> Ints:
        """Of each device, its node's number, as `Topology.node` says it."""
        spans = np.array([1 + max(group.kind.nodes) for group in self.topology.groups])[self.group]
        within = np.concatenate(
            [np.tile(group.kind.nodes, group.count) for group in self.topology.groups]
        )
        found: Ints = (np.cumsum(spans) - spans)[self.unit] + within
        return found

    @cached_property
    def inverse(self) -> Floats:
        """Seconds that a byte takes on each resource, in each protocol: (protocols, resources)."""
        parts = [
            np.tile(self._inverse(routes.capacities), group.count)
            for routes, group in zip(self.routes, self.topology.groups, strict=True)
        ]
        return np.concatenate([*parts, *map(self._uplinks, range(self._upper))], axis=1)

    @cached_property
    def members(self) -> list[Ints]:
        """At each level, of each unit the number of its group of nodes; the lowest has the units themselves."""
        units = np.arange(len(self.group))
        return [units, *(units // level.nodes for level in self.topology.levels)]

    @cached_property
    def out(self) -> PortRoutes:
        """From each device into the network."""
        return self._ways(outwards=True)

    @cached_property
    def into(self) -> PortRoutes:
        """From the network to each device."""
        return self._ways(outwards=False)

    @cached_property
    def port_waits(self) -> Floats:
        """Of each unit, seconds until a message has passed its ports, in each protocol: (protocols, units)."""
        waits = np.array([self._port_wait(group) for group in range(len(self.routes))])
        found: Floats = waits.T[:, self.group]
        return found

    @cached_property
    def level_waits(self) -> Floats:
        """Seconds that a message takes through the switches, by the level at which two units meet; 0 for the same."""
        found = [0.0]
        below = 0.0
        for level in self.topology.levels:
            found.append(below + level.latency)
            below += 2 * level.latency
        return np.array(found)

    def meeting(self, some: Ints, others: Ints) -> Ints:
        """The level at which units meet, pair by pair; 0 for the same unit."""
        level = np.zeros(len(some), dtype=np.int64)
        for members in self.members[:-1]:
            level += members[some] != members[others]
        return level

    def uplink(self, level: int, units: Ints, down: bool = False) -> Ints:
        """The resources between units' groups of a level, from 1, and the level above."""
        sizes = [int(members[-1]) + 1 for members in self.members[1 : 1 + self._upper]]
        first = self._in_nodes + 2 * sum(sizes[: level - 1])
        return first + down * sizes[level - 1] + self.members[level][units]

    def waits(self, way: Route) -> list[float]:
        """Seconds until a message has gone a way, in each protocol."""
        return [
            way.latency + max((link.protocol(name).hop for link in way.links), default=0.0)
            for name in self.protocols
        ]

    @property
    def _upper(self) -> int:
        """The number of levels with uplinks: all but the top."""
        return max(len(self.topology.levels) - 1, 0)

    def _inverse(self, capacities: list[tuple[LinkKind, float]]) -> Floats:
        return np.array(
            [
                [1.0 / (rate * link.protocol(name).share) for link, rate in capacities]
                for name in self.protocols
            ]
        ).reshape(len(self.protocols), len(capacities))

    def _uplinks(self, place: int) -> Floats:
        """The uplinks of a level; their protocols reach there what they reach at the ports below."""
        level = self.topology.levels[place]
        members = self.members[1 + place]
        ports = np.array([_port_rates(group, self.protocols) for group in self.topology.groups])
        reached = np.array(
            [
                np.bincount(members, weights=ports[self.group, 1 + p])
                for p in range(len(self.protocols))
            ]
        )
        reached = reached / level.oversubscription
        if level.uplink is not None:
            raw = np.bincount(members, weights=ports[self.group, 0])
            reached = reached * (level.oversubscription * level.uplink / raw)
        return np.tile(1.0 / reached, 2)

    def _ways(self, outwards: bool) -> PortRoutes:
        counts: list[Ints] = []
        resources: list[Ints] = []
        for number, routes in enumerate(self.routes):
            find = routes.out if outwards else routes.into
            ways = [np.array(find(device).resources) for device in range(len(routes.kind))]
            units = np.flatnonzero(self.group == number)
            counts.append(np.tile([len(way) for way in ways], len(units)))
            resources.append((self.base[units][:, None] + np.concatenate(ways)[None, :]).ravel())
        begin = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
        return PortRoutes(begin, np.concatenate(resources))

    def _port_wait(self, group: int) -> list[float]:
        routes = self.routes[group]
        ways = [routes.out(device) for device in range(len(routes.kind))]
        return [max(waits) for waits in zip(*map(self.waits, ways), strict=True)]


def _port_rates(group: NodeGroup, protocols: tuple[str, ...]) -> list[float]:
    """Bytes a second that all ports of a node carry: bare, then in each protocol."""
    ports = group.kind.ports
    reached = [sum(port.rate * port.link.protocol(p).share for port in ports) for p in protocols]
    return [sum(port.rate for port in ports), *reached]
