"""Topology: the devices of a machine and what links them, as frozen data."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import final

from weft.cached import cached_property
from weft.hardware.kinds.device_kind import DeviceKind
from weft.hardware.kinds.device_kinds import device_kind
from weft.hardware.topology.link_kind import LinkKind
from weft.hardware.topology.node_kind import NodeKind, NodeLink, NodePort
from weft.units import Seconds


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
    nodes: int
    latency: Seconds
    uplink: float | None = None
    oversubscription: float = 1.0


@final
@dataclass(frozen=True)
class Topology:
    """The devices of a machine, numbered 0 to n - 1 node by node, and what links them. Rank r runs on device r.

    Attributes:
        name: of the machine.
        groups: its nodes.
        levels: of the network between nodes, from the lowest up; () where there is one node.
        devices: how many devices are used: the first ones; those behind lie idle.
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
