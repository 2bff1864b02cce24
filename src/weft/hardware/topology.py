"""Topology: the devices of a machine and what links them, as frozen data."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, TypeAlias, final

from weft.cached import cached_property
from weft.hardware.devices import DeviceKind, Microseconds, Rate, device_kind
from weft.schema import Bounds, Key, Length
from weft.units import NO_TIME

Count: TypeAlias = Annotated[int, Bounds(least=1, most=1 << 20)]
# The number of links side by side, or how many times the bandwidth of one another has.
Width: TypeAlias = Annotated[float, Bounds(above=0, most=1e6)]


@final
@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Equal nodes that follow one another.

    Attributes:
        kind: what is in each.
        count: how many there are.
    """

    kind: NodeKind
    count: int


@final
@dataclass(frozen=True, slots=True)
class NetworkLevel:
    """A level of switches between nodes: groups of nodes that reach one another within it.

    Attributes:
        name: such as "leaf".
        nodes: nodes of a group, in the order of their numbers; the last group may have fewer. The top level has all.
        latency: seconds that a crossing of its switches takes.
        uplink: bytes a second each way between a group and the level above, all its nodes together. None for the sum
            of the ports below, divided by `oversubscription`.
        oversubscription: how many times as much the ports below carry as the uplink does.
    """

    name: str
    nodes: Count
    latency: Annotated[Microseconds, Key("latency_microseconds")] = NO_TIME
    uplink: Annotated[Rate | None, Key("uplink_gb_per_second")] = None
    oversubscription: Width = 1.0


@final
@dataclass(frozen=True)
class Topology:
    """The devices of a machine, numbered 0 to n - 1 node by node, and what links them. Rank r runs on device r.

    Attributes:
        name: of the machine.
        groups: its nodes.
        levels: of the network between nodes, from the lowest up; () if there is one node.
        devices: number of devices in use, from the first; the others are idle.
    """

    name: str
    groups: tuple[NodeGroup, ...]
    levels: tuple[NetworkLevel, ...]
    devices: int

    def __len__(self) -> int:
        return self.devices

    def kind(self, device: int) -> DeviceKind:
        """The kind of a device.

        Raises:
            IndexError: when there is no such device.
        """
        group, _, local = self._place(device)
        return device_kind(self.groups[group].kind.kinds[local])

    def node(self, device: int) -> int:
        """The number of a device's node.

        Raises:
            IndexError: when there is no such device.
        """
        group, within, local = self._place(device)
        kind = self.groups[group].kind
        return self._first_nodes[group] + within * (1 + max(kind.nodes)) + kind.nodes[local]

    @cached_property
    def link_kinds(self) -> tuple[LinkKind, ...]:
        """Every kind of link that there is, in the order in which they are met."""
        found: dict[str, LinkKind] = {}
        for group in self.groups:
            parts: tuple[NodeLink | NodePort, ...] = (*group.kind.links, *group.kind.ports)
            for part in parts:
                found.setdefault(part.link.name, part.link)
        return tuple(found.values())

    def _place(self, device: int) -> tuple[int, int, int]:
        """Number of the group, of the node within the group, and of the device within the node."""
        if not 0 <= device < self.devices:
            raise IndexError(f"device {device} of {self.devices}")
        group = bisect_right(self._first_devices, device) - 1
        size = len(self.groups[group].kind)
        within, local = divmod(device - self._first_devices[group], size)
        return group, within, local

    @cached_property
    def _first_devices(self) -> tuple[int, ...]:
        return _starts(len(group.kind) * group.count for group in self.groups)

    @cached_property
    def _first_nodes(self) -> tuple[int, ...]:
        return _starts((1 + max(group.kind.nodes)) * group.count for group in self.groups)


def _starts(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(accumulate(sizes, initial=0))[:-1]


# The protocol that stands for all that a kind of link does not name.
ANY = "any"


@final
@dataclass(frozen=True, slots=True)
class LinkProtocol:
    """A way in which a communication library sends over a link: quick to begin, or near to the link's rate.

    Attributes:
        base: seconds that a communication takes at least, whatever it sends.
        hop: seconds from the begin of a message to its arrival at the next device.
        share: of the link's rate that messages reach, above 0 and at most 1.
    """

    base: Annotated[Microseconds, Key("base_microseconds")] = NO_TIME
    hop: Annotated[Microseconds, Key("hop_microseconds")] = NO_TIME
    share: Annotated[float, Bounds(above=1e-6, most=1)] = 1.0


@final
@dataclass(frozen=True)
class LinkKind:
    """A kind of link, as the catalogue or a topology's file says it.

    Attributes:
        name: such as "nvlink3".
        rate: bytes a second each way, of one link.
        latency: seconds that the wire takes, or the switch behind it, beside a protocol's `hop`.
        protocols: by name, or `ANY`; the fastest that all links of a communication have counts. If none is named,
            one that reaches the whole rate at once; no library has more than 16.
        in_flight: messages to different peers that a device sends at a time.
        own: bytes a second at which a collective's kernel puts a device's own part of the result in place,
            where that is not hidden behind the link; None if it is.
        in_switch: protocol of collectives whose sums a switch makes that joins all members by such links; None if
            switches only pass bytes on.
    """

    name: str
    rate: Annotated[Rate, Key("gb_per_second")]
    latency: Annotated[Microseconds, Key("latency_microseconds")] = NO_TIME
    protocols: Annotated[Mapping[str, LinkProtocol], Length(1, 16)] = field(
        hash=False, default_factory=lambda: {ANY: LinkProtocol()}
    )
    in_flight: Count = 1
    own: Annotated[Rate | None, Key("own_gb_per_second")] = None
    in_switch: LinkProtocol | None = None

    def protocol(self, name: str) -> LinkProtocol:
        """The figures of a protocol, or those of `ANY`."""
        found = self.protocols.get(name)
        return self.protocols[ANY] if found is None else found


def common_protocols(kinds: Sequence[LinkKind]) -> tuple[str, ...]:
    """The names of the protocols that all kinds of link have; () if there is none."""
    names = dict.fromkeys(name for kind in kinds for name in kind.protocols if name != ANY)
    found = [
        name
        for name in names
        if all(name in kind.protocols or ANY in kind.protocols for kind in kinds)
    ]
    everywhere = kinds and all(ANY in kind.protocols for kind in kinds)
    return (*found, ANY) if everywhere or not kinds else tuple(found)


@final
@dataclass(frozen=True, slots=True)
class NodeLink:
    """Links between two vertices of a node.

    Attributes:
        source, target: places in `NodeKind.vertices`.
        link: its kind.
        width: number of parallel links.
        one_way: true if bytes cross from source to target only.
        shared: a name, with which links share the capacity of one, in each direction; "" for none.
    """

    source: int
    target: int
    link: LinkKind
    width: float = 1.0
    one_way: bool = False
    shared: str = ""

    @property
    def rate(self) -> float:
        """Bytes a second each way."""
        return self.link.rate * self.width


@final
@dataclass(frozen=True, slots=True)
class NodePort:
    """A way from a node into the network, such as a network card.

    Attributes:
        link: its kind.
        width: how many such links it has.
        at: places of the vertices that it is attached to; other devices' bytes cross the node's links to the nearest.
    """

    link: LinkKind
    width: float
    at: tuple[int, ...]

    @property
    def rate(self) -> float:
        """Bytes a second each way."""
        return self.link.rate * self.width


@final
@dataclass(frozen=True)
class NodeKind:
    """A node: devices, what links them, and its ports.

    Attributes:
        kinds: name of the device kind of each device, in the order of their numbers.
        vertices: names: the devices in order, then switches. Bytes pass through switches, not through devices.
        links: inside the node.
        ports: to the network, where there is one.
        nodes: of each device, its node's number within, where the graph is a whole machine; zeros for a node.
    """

    kinds: tuple[str, ...]
    vertices: tuple[str, ...]
    links: tuple[NodeLink, ...]
    ports: tuple[NodePort, ...]
    nodes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.kinds)
