"""NodeRoutes: the ways inside a node of one kind, and to its ports."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from weft.cached import cached_property
from weft.hardware.topology.machine import LinkKind, NodeKind

# Bytes of the message for which a way is the quickest.
_MESSAGE = 1 << 20
# The last step of the quickest way to a vertex: the vertex before, the resource, the kind of link.
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

    A resource is one direction of links that share a capacity. Those of a node are numbered: first those of its inner
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
        for number in range(len(kind.links)):
            self._add(number)
        self._inner = len(self.capacities)
        for _ in ("out", "in"):
            self.capacities += [(port.link, port.rate) for port in kind.ports]

    def route(self, source: int, target: int) -> Route | None:
        """The quickest way between two vertices; None where there is none."""
        found = self._routes.get((source, target))
        if found is None:
            last = self._last.get(source)
            if last is None:
                last = self._last[source] = self._from(source)
            if target != source and target not in last:
                return None
            found = self._routes[source, target] = _traced(target, last)
        return found

    def out(self, device: int) -> Route:
        """From a device into the network, over its port."""
        port, way = self._ports[device]
        link = self.kind.ports[port].link
        return Route((*way.resources, self._inner + port), (*way.links, link))

    def into(self, device: int) -> Route:
        """From the network to a device, over the port that it sends by."""
        port, _ = self._ports[device]
        ways = (self.route(at, device) for at in self.kind.ports[port].at)
        way = min(filter(None, ways), key=_seconds)
        link = self.kind.ports[port].link
        return Route(
            (self._inner + len(self.kind.ports) + port, *way.resources), (link, *way.links)
        )

    def _add(self, number: int) -> None:
        link = self.kind.links[number]
        ends = ((link.source, link.target), (link.target, link.source))
        for backward, (source, target) in enumerate(ends[: 1 if link.one_way else 2]):
            key = (link.shared or f"#{number}", bool(backward))
            resource = self._shared.setdefault(key, len(self.capacities))
            if resource == len(self.capacities):
                self.capacities.append((link.link, link.rate))
            self._steps[source].append((target, resource, link.link))

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
        """Of each device, the number of its port and the way to it."""
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
            for way in (self._to(device, port.at),)
            if way is not None
        }
        least = min(map(_seconds, ways.values()))
        return {number: way for number, way in ways.items() if _seconds(way) == least}

    def _to(self, device: int, vertices: Sequence[int]) -> Route | None:
        ways = (self.route(device, vertex) for vertex in vertices)
        return min(filter(None, ways), key=_seconds, default=None)


def _seconds(way: Route) -> float:
    return way.latency + sum(_MESSAGE / link.rate for link in way.links)


def _traced(vertex: int, last: dict[int, _Step]) -> Route:
    resources: list[int] = []
    links: list[LinkKind] = []
    while vertex in last:
        vertex, resource, link = last[vertex]
        resources.append(resource)
        links.append(link)
    return Route(tuple(reversed(resources)), tuple(reversed(links)))
