"""Network: the resources of a whole topology in arrays, and what bytes between nodes cross."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from weft.cached import cached_property
from weft.hardware.topology import LinkKind, NodeGroup, NodeKind, Topology, common_protocols

# Bytes of the message for which a way is the fastest.
_MESSAGE = 1 << 20
# The last step of the fastest way to a vertex: the vertex before, the resource, the kind of link.
_Step: TypeAlias = tuple[int, int, LinkKind]


@final
@dataclass(frozen=True, slots=True)
class Route:
    """The links that bytes cross from one vertex to another.

    Attributes:
        resources: numbers, within the node.
        links: kinds of the links, in order.
    """

    resources: tuple[int, ...]
    links: tuple[LinkKind, ...]

    @property
    def latency(self) -> float:
        """Seconds of the wires and switches."""
        return sum(link.latency for link in self.links)


@final
class NodeRoutes:
    """The ways between the devices of a node, and from them to the ports.

    A resource is one direction of links that share a capacity. The resources of a node are numbered: first its inner
    links, then every port outwards, then every port inwards.

    Attributes:
        kind: of the node.
        capacities: of each resource, its kind of link and bytes a second.
    """

    def __init__(self, kind: NodeKind) -> None:
        self.kind = kind
        self.capacities: list[tuple[LinkKind, float]] = []
        self._steps: list[list[tuple[int, int, LinkKind]]] = [[] for _ in kind.vertices]
        self._shared: dict[tuple[str, bool], int] = {}
        self._last: dict[int, dict[int, _Step]] = {}
        self._routes: dict[tuple[int, int], Route] = {}
        for number, link in enumerate(kind.links):
            ends = ((link.source, link.target), (link.target, link.source))
            for backward, (source, target) in enumerate(ends[: 1 if link.one_way else 2]):
                key = (link.shared or f"#{number}", bool(backward))
                resource = self._shared.setdefault(key, len(self.capacities))
                if resource == len(self.capacities):
                    self.capacities.append((link.link, link.rate))
                self._steps[source].append((target, resource, link.link))
        self._inner = len(self.capacities)
        for _ in ("out", "in"):
            self.capacities += [(port.link, port.rate) for port in kind.ports]

    def route(self, source: int, target: int) -> Route | None:
        """The fastest way between two vertices; None if there is none."""
        found = self._routes.get((source, target))
        if found is None:
            last = self._last.get(source)
            if last is None:
                last = self._last[source] = self._from(source)
            if target != source and target not in last:
                return None
            steps = list[tuple[int, LinkKind]]()
            vertex = target
            while vertex in last:
                vertex, resource, link = last[vertex]
                steps.append((resource, link))
            steps.reverse()
            resources = tuple(resource for resource, _ in steps)
            found = Route(resources, tuple(link for _, link in steps))
            self._routes[source, target] = found
        return found

    def out(self, device: int) -> Route:
        """From a device into the network, over its port."""
        port, way = self._ports[device]
        link = self.kind.ports[port].link
        return Route((*way.resources, self._inner + port), (*way.links, link))

    def into(self, device: int) -> Route:
        """The way from the network to a device, over the port that the device sends by."""
        port, _ = self._ports[device]
        ways = (self.route(at, device) for at in self.kind.ports[port].at)
        way = min(filter(None, ways), key=_seconds)
        link = self.kind.ports[port].link
        return Route(
            (self._inner + len(self.kind.ports) + port, *way.resources), (link, *way.links)
        )

    def _from(self, source: int) -> dict[int, _Step]:
        """Dijkstra's shortest paths, by the seconds of a message; equal ones by the number of the vertex.

        Returns:
            The last step to each vertex that is reached.
        """
        seconds = {source: 0.0}
        last: dict[int, _Step] = {}
        heap, done = [(0.0, source)], set[int]()
        while heap:
            so_far, vertex = heapq.heappop(heap)
            if vertex in done:
                continue
            done.add(vertex)
            if vertex != source and vertex < len(self.kind):
                continue
            for target, resource, link in self._steps[vertex]:
                then = so_far + link.latency + _MESSAGE / self.capacities[resource][1]
                if then < seconds.get(target, float("inf")):
                    seconds[target] = then
                    last[target] = vertex, resource, link
                    heapq.heappush(heap, (then, target))
        return last

    @cached_property
    def _ports(self) -> list[tuple[int, Route]]:
        nearest = [self._nearest(device) for device in range(len(self.kind))]
        rivals: dict[tuple[int, ...], list[int]] = {}
        for device, near in enumerate(nearest):
            rivals.setdefault(tuple(sorted(near)), []).append(device)
        found: dict[int, tuple[int, Route]] = {}
        for ports, devices in rivals.items():
            # Devices that are equally near to several ports share them evenly, neighbours first.
            for place, device in enumerate(devices):
                port = ports[place * len(ports) // len(devices)]
                found[device] = port, nearest[device][port]
        return [found[device] for device in range(len(self.kind))]

    def _nearest(self, device: int) -> dict[int, Route]:
        """The ports that a device reaches most quickly."""
        ways = {
            number: way
            for number, port in enumerate(self.kind.ports)
            for way in (
                min(
                    filter(None, (self.route(device, at) for at in port.at)),
                    key=_seconds,
                    default=None,
                ),
            )
            if way is not None
        }
        least = min(map(_seconds, ways.values()))
        return {number: way for number, way in ways.items() if _seconds(way) == least}


def _seconds(way: Route) -> float:
    return way.latency + sum(_MESSAGE / link.rate for link in way.links)


Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


def entries_of(begin: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """The entries of some rows that lie one after the other, and of each entry the place of its row in `rows`."""
    counts = begin[rows + 1] - begin[rows]
    place = np.repeat(np.arange(len(rows)), counts)
    within = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
    return begin[rows][place] + within, place


@final
@dataclass(frozen=True)
class PortRoutes:
    """The ways of all devices into the network, or back, one after the other.

    Attributes:
        begin: of each device, its place in `resources`, and the end.
        resources: numbers, over the whole topology.
    """

    begin: Ints
    resources: Ints

    def of(self, devices: Ints) -> tuple[Ints, Ints]:
        """The resources that devices cross, and of each, the place in `devices`."""
        entries, place = entries_of(self.begin, devices)
        return self.resources[entries], place


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
        """For each device the number of its node (`Topology.node`)."""
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
        """For each unit, seconds until a message has passed its ports, in each protocol: (protocols, units)."""
        every = []
        for routes in self.routes:
            ways = [routes.out(device) for device in range(len(routes.kind))]
            every.append([max(waits) for waits in zip(*map(self.waits, ways), strict=True)])
        found: Floats = np.array(every).T[:, self.group]
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

    def uplinks(self, sources: Ints, targets: Ints) -> Iterator[tuple[Ints, npt.NDArray[np.bool_]]]:
        """The uplinks that bytes between units cross, and for which of these pairs: level by level, up and down."""
        level = self.meeting(sources, targets)
        for above in range(1, int(level.max(initial=0))):
            over = level > above
            for down, side in enumerate((sources, targets)):
                yield self.uplink(above, side[over], bool(down)), over

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


def _port_rates(group: NodeGroup, protocols: tuple[str, ...]) -> list[float]:
    ports = group.kind.ports
    reached = [sum(port.rate * port.link.protocol(p).share for port in ports) for p in protocols]
    return [sum(port.rate for port in ports), *reached]
