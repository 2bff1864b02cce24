"""Pattern: adds up what the messages of a collective load and wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, final

import numpy as np

from weft.cached import cached_property
from weft.hardware.rings import Flows
from weft.hardware.routes import Floats, Ints, Network, NodeRoutes, entries_of
from weft.hardware.topology import LinkKind
from weft.units import Seconds

Groups: TypeAlias = tuple[tuple[int, ...], ...]


@final
class GroupSet:
    """Groups of at least two devices each.

    A part is what a group has in one unit. Members are in the order of groups and of device numbers, so that the
    order in which a group names them changes nothing.

    Attributes:
        device, owner: of each member, its device and the number of its group.
        sizes: members of each group.
        begin: of each part, its first member; and the end.
        group, unit: of each part.
        many: of each part, its members.
        after: of each part, the next one of its group, around.
        level: of each part, the level at which it meets the next.
    """

    def __init__(self, network: Network, groups: Groups) -> None:
        self.network = network
        self.groups = groups
        self.sizes = np.array([len(group) for group in groups], dtype=np.int64)
        self.device = np.array([device for group in groups for device in sorted(group)])
        self.owner = np.repeat(np.arange(len(groups)), self.sizes)
        unit = network.unit[self.device]
        new = np.ones(len(unit), dtype=bool)
        new[1:] = (unit[1:] != unit[:-1]) | (self.owner[1:] != self.owner[:-1])
        self.begin = np.append(np.flatnonzero(new), len(unit))
        self.group = self.owner[self.begin[:-1]]
        self.unit = unit[self.begin[:-1]]
        self.many = np.diff(self.begin)
        self.parts = np.bincount(self.group, minlength=len(groups))
        last = np.cumsum(self.parts) - 1
        self.after = np.arange(1, len(self.group) + 1)
        self.after[last] = last - self.parts + 1
        self.level = network.meeting(self.unit, self.unit[self.after])

    @cached_property
    def part(self) -> Ints:
        """The part of each member."""
        return np.repeat(np.arange(len(self.group)), self.many)

    @cached_property
    def spread(self) -> Floats:
        """For each group, the share of a tensor that a member does not hold: (n - 1) / n."""
        return (self.sizes - 1) / self.sizes

    def alike(self) -> Iterator[tuple[int, tuple[int, ...], Ints]]:
        """Parts of equal members in equal nodes: the number of the group of nodes, the members' places, the parts."""
        found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        local = self.network.local[self.device].tolist()
        kinds = self.network.group[self.unit].tolist()
        begin = self.begin.tolist()
        for part, kind in enumerate(kinds):
            members = tuple(local[begin[part] : begin[part + 1]])
            found.setdefault((kind, members), []).append(part)
        for (kind, members), parts in found.items():
            yield kind, members, np.array(parts)

    def within_nodes(self) -> Groups:
        """The groups' members of each node, where there are several."""
        return tuple(held for nodes in self._by_node for held in nodes if len(held) > 1)

    def across_nodes(self) -> Groups:
        """For each group the first members of its nodes, the second ones, and so on."""
        return tuple(
            held for nodes in self._by_node for held in zip(*nodes, strict=True) if len(held) > 1
        )

    @cached_property
    def per_node(self) -> int | None:
        """The members that each group has in each of its nodes; None if they differ, or where a part is all."""
        counts = {len(held) for nodes in self._by_node for held in nodes}
        several = any(len(nodes) > 1 for nodes in self._by_node)
        return counts.pop() if several and len(counts) == 1 else None

    @cached_property
    def _by_node(self) -> list[list[tuple[int, ...]]]:
        found = []
        for group in map(sorted, self.groups):
            nodes: dict[int, list[int]] = {}
            for device, node in zip(group, self.network.node[group].tolist(), strict=True):
                nodes.setdefault(node, []).append(device)
            found.append([tuple(held) for held in nodes.values()])
        return found


_Inner: TypeAlias = "Callable[[NodeRoutes, tuple[int, ...]], Flows]"


def total(group: Ints, weights: Floats) -> Floats:
    """The sum of the weights of each group."""
    return np.bincount(group, weights=weights).astype(np.float64)


def longest(group: Ints, weights: Floats) -> Floats:
    """The largest weight of each group."""
    found = np.zeros(int(group.max()) + 1)
    np.maximum.at(found, group, weights)
    return found


@final
class Pattern:
    """Adds up the loads and waits of one pattern."""

    def __init__(self, groups: GroupSet) -> None:
        self._groups = groups
        self._network = groups.network
        self._loads = LinkLoads(groups.network)
        protocols = len(groups.network.protocols)
        self._bases = np.zeros(protocols)
        self.longest_hop = np.zeros((protocols, 1))
        self.in_flight = 1 << 30
        self._own = 0.0

    def inside(self, flows: _Inner, factor: Floats) -> Floats:
        """Load the links within nodes with each part's flows times a factor.

        Returns:
            Seconds of the messages, one after the other, in each protocol and part.
        """
        network, groups = self._network, self._groups
        waits = np.zeros((len(network.protocols), len(groups.group)))
        for kind, members, parts in groups.alike():
            if len(members) < 2:
                continue
            routes = network.routes[kind]
            resources, loads, hops = self._flows(routes, flows(routes, members))
            base = network.base[groups.unit[parts]]
            self._loads.add(base[:, None] + resources, factor[parts][:, None] * loads)
            waits[:, parts] = np.outer(hops, factor[parts])
        return waits

    def border(self, parts: Ints, factor: Floats) -> None:
        """LinkLoads the ports of parts, outwards and inwards, with each part's factor, spread over its members."""
        network, groups = self._network, self._groups
        if not len(parts):
            # A machine without a network has no ports.
            return
        members, place = entries_of(groups.begin, parts)
        share = (factor / groups.many[parts])[place]
        for routes in (network.out, network.into):
            resources, member = routes.of(groups.device[members])
            self._loads.add(resources, share[member])
        for kind in np.unique(network.group[groups.unit[parts]]).tolist():
            for port in network.routes[kind].kind.ports:
                self._met(port.link)

    def crossing(self, sources: Ints, targets: Ints, factor: Floats) -> Floats:
        """Load the uplinks that parts cross to other parts with the factor of each pair.

        Returns:
            Seconds until a message has crossed, in each protocol and pair.
        """
        network, groups = self._network, self._groups
        if not len(sources):
            return np.zeros((len(network.protocols), 0))
        units = groups.unit[sources], groups.unit[targets]
        for resources, over in network.uplinks(*units):
            self._loads.add(resources, factor[over])
        waits = network.port_waits
        found: Floats = np.maximum(waits[:, units[0]], waits[:, units[1]])
        return found + network.level_waits[network.meeting(*units)]

    def outside(self, share: Floats) -> Floats:
        """Load the ports with the bytes that all members exchange with other nodes, `share` for each.

        Returns:
            Seconds of the longest way, in each protocol and part.
        """
        network, groups = self._network, self._groups
        parts = np.flatnonzero(groups.level)
        away = groups.sizes[groups.group] - groups.many
        self.border(parts, (away * share * groups.many)[parts])
        highest = longest(groups.group, groups.level.astype(float))[groups.group].astype(np.int64)
        for above in range(1, int(highest.max(initial=0))):
            self._add_uplinks(above, share)
        found = np.zeros((len(network.protocols), len(groups.group)))
        if len(parts):
            waits = network.port_waits[:, groups.unit[parts]]
            found[:, parts] = waits + network.level_waits[highest[parts]]
        return found

    def traffic(
        self, waits: Floats, total: Callable[..., Floats], more: Floats | None = None
    ) -> Traffic:
        """The traffic, given each part's waits; of a group they are its parts' `total`. `more` counts once at most."""
        group = self._groups.group
        found = [total(group, weights=row) for row in waits]
        if more is not None:
            found = [one + longest(group, row) for one, row in zip(found, more, strict=True)]
        latency = tuple(float(one.max()) for one in found)
        bases = tuple(self._bases.tolist())
        return Traffic(bases, latency, self._loads.per_byte(), self._own, self._loads)

    def only(self, protocol: int, base: float) -> Traffic:
        """The traffic of a pattern that runs in one protocol only, after so many seconds."""
        count = len(self._network.protocols)
        bases = tuple(base if place == protocol else float("inf") for place in range(count))
        return Traffic(bases, (0.0,) * count, self._loads.per_byte(), 0.0, self._loads)

    def _add_uplinks(self, above: int, share: Floats) -> None:
        """LinkLoads uplinks with that which a group's members below them exchange with those elsewhere."""
        groups, network = self._groups, self._network
        units = network.members[above][groups.unit]
        key = groups.group * (int(units.max()) + 1) + units
        _, first, place = np.unique(key, return_index=True, return_inverse=True)
        held = np.bincount(place.ravel(), weights=groups.many)
        away = groups.sizes[groups.group[first]] - held
        for down in (False, True):
            resources = network.uplink(above, groups.unit[first], down)
            self._loads.add(resources, held * away * share[first])

    def _flows(self, routes: NodeRoutes, flows: Flows) -> tuple[Ints, Floats, Floats]:
        """Resources and loads of flows, and the seconds of their hops by share, in each protocol."""
        resources: list[int] = []
        loads: list[float] = []
        hops = np.zeros(len(self._network.protocols))
        for (source, target), share in flows.items():
            way = routes.route(source, target)
            assert way is not None
            resources += way.resources
            loads += [share] * len(way.resources)
            waits = np.array(self._network.waits(way))
            hops += share * waits
            self.longest_hop = np.maximum(self.longest_hop, waits[:, None])
            for link in way.links:
                self._met(link)
        return np.array(resources), np.array(loads), hops

    def _met(self, link: LinkKind) -> None:
        names = self._network.protocols
        self._bases = np.maximum(self._bases, [link.protocol(name).base for name in names])
        self.in_flight = min(self.in_flight, link.in_flight)
        self._own = max(self._own, 1 / link.own if link.own else 0.0)


@final
class BusyLinks(NamedTuple):
    """Resources that a communication crosses, each once, and the seconds in which it needs each of them whole."""

    resources: Ints
    seconds: Floats


@final
@dataclass(frozen=True, slots=True)
class Traffic:
    """A pattern of messages that run at the same time, each figure for every protocol.

    Attributes:
        base: seconds that the library takes.
        latency: seconds of the messages that wait for one another.
        per_byte: seconds for each byte of a rank's tensor, on the resource that is the busiest.
        own: seconds for each byte in which a device puts its own part in place.
        loads: on the links.
    """

    base: tuple[float, ...]
    latency: tuple[float, ...]
    per_byte: tuple[float, ...]
    own: float
    loads: LinkLoads = field(compare=False)

    def seconds(self, size: float, rounds: float = 1.0, own: float = 0.5) -> Seconds:
        """Seconds of the fastest protocol, where the pattern runs `rounds` times on `size` bytes."""
        return Seconds(min(self._by_protocol(size, rounds)) + own * size * self.own)

    def busy(self, size: float, rounds: float = 1.0) -> BusyLinks:
        """The links that the fastest protocol needs, where the pattern runs `rounds` times on `size` bytes."""
        found = self._by_protocol(size, rounds)
        resources, seconds = self.loads.busy(found.index(min(found)))
        return BusyLinks(resources, rounds * size * seconds)

    def _by_protocol(self, size: float, rounds: float) -> list[float]:
        return [
            base + rounds * (latency + size * rate)
            for base, latency, rate in zip(self.base, self.latency, self.per_byte, strict=True)
        ]


@final
class LinkLoads:
    """Bytes on each resource of a network, for each byte of a rank's tensor."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._resources: list[Ints] = []
        self._loads: list[Floats] = []

    def add(self, resources: Ints, loads: Floats) -> None:
        """LinkLoads on resources, of any one shape; a resource may come more than once."""
        self._resources.append(resources.ravel())
        self._loads.append(np.broadcast_to(loads, resources.shape).ravel())

    def per_byte(self) -> tuple[float, ...]:
        """Seconds for each byte on the busiest resource, in each protocol."""
        met, total = self._total
        if not len(met):
            return (0.0,) * len(self._network.protocols)
        return tuple((self._network.inverse[:, met] * total).max(axis=1).tolist())

    def busy(self, protocol: int) -> BusyLinks:
        """The resources that carry something, and seconds for each byte on each of them in a protocol."""
        met, total = self._total
        return BusyLinks(met, self._network.inverse[protocol, met] * total)

    @cached_property
    def _total(self) -> tuple[Ints, Floats]:
        """The resources that carry something, and how much; nothing is added after this was asked for."""
        if not self._resources:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        total = np.bincount(
            np.concatenate(self._resources),
            weights=np.concatenate(self._loads),
            minlength=self._network.inverse.shape[1],
        )
        self._resources.clear()
        self._loads.clear()
        met: Ints = np.flatnonzero(total)
        loads: Floats = total[met].astype(np.float64)
        return met, loads
