"""A topology from the content of a file, checked whole: the result is legal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal, final

from weft.errors import UserError, wrong
from weft.hardware.devices import device_kind, read_yaml
from weft.hardware.topology import (
    Count,
    LinkKind,
    NetworkLevel,
    NodeGroup,
    NodeKind,
    NodeLink,
    NodePort,
    Topology,
    Width,
    common_protocols,
)
from weft.schema import Bounds, Length, OneOf, check_known, read

LINKS = Path(__file__).parent / "catalogue" / "links.yaml"
TOPOLOGIES = Path(__file__).parent / "catalogue" / "topologies"
_SIZED = re.compile(r"(?P<name>.+)x(?P<devices>\d{1,100})", re.ASCII)
# Devices, switches or ports of a node.
_MOST = 4096
_SOME = Length(0, _MOST)


# Entries of files, as users write them.


@final
@dataclass(frozen=True, slots=True)
class _Devices:
    """`count` equal devices; a name is for a single one, a node's number for a file of a whole machine."""

    kind: str
    count: Annotated[int, Bounds(least=1, most=_MOST)] = 1
    name: str | None = None
    node: int = 0


@final
@dataclass(frozen=True, slots=True)
class _Switch:
    """A switch, and the devices or switches that links join to it."""

    name: str
    link: str | None = None
    width: Width = 1.0
    joins: Annotated[tuple[str, ...], _SOME] | Literal["devices"] = ()


@final
@dataclass(frozen=True, slots=True)
class _Link:
    """A link between two devices or switches."""

    between: Annotated[tuple[str, ...], Length(2, 2)]
    link: str
    width: Width = 1.0
    one_way: bool = False
    shared: str = ""


@final
@dataclass(frozen=True, slots=True)
class _Ports:
    """A port at vertices, or `count` of them, each at an equal part of the devices."""

    link: str
    width: Width = 1.0
    count: Count | None = None
    at: Annotated[tuple[str, ...], Length(1, _MOST)] | None = None


@final
@dataclass(frozen=True, slots=True)
class _Nodes:
    """`count` equal nodes."""

    devices: _Devices | Annotated[tuple[_Devices, ...], Length(1, _MOST)]
    count: Count = 1
    switches: Annotated[tuple[_Switch, ...], _SOME] = ()
    links: tuple[_Link, ...] = ()
    ports: Annotated[tuple[_Ports, ...], _SOME] = ()


@final
@dataclass(frozen=True, slots=True)
class _File:
    """A whole file; `weft_topology` is the version of the format."""

    weft_topology: Literal[1]
    name: str
    nodes: Annotated[tuple[_Nodes, ...], Length(1, 1024)]
    links: Mapping[str, Any] = field(default_factory=dict)
    network: Annotated[tuple[Mapping[str, Any], ...], Length(0, 16)] = ()
    devices: Count | None = None
    source: Any = None


def parse_topology(
    content: Any, where: str, devices: int | None = None, calibrated: bool = True
) -> Topology:
    """A topology from the content of a file.

    Args:
        content: of the file, as plain data.
        where: named in errors.
        devices: number of devices; nodes of the file are added or left out.
        calibrated: False uses only the published figures of the catalogue's links.

    Raises:
        UserError: when a field is missing, unknown or out of range, a link leads nowhere, or devices do not reach one
            another.
    """
    file = read(_File, content, where)
    kinds = dict(link_kinds(calibrated))
    for name, fields in file.links.items():
        kinds[name] = parse_link_kind(name, fields, f"{where}: links: {name}", calibrated)
    groups = [
        NodeGroup(_node(nodes, f"{where}: nodes[{place}]", kinds), nodes.count)
        for place, nodes in enumerate(file.nodes)
    ]
    wanted = file.devices if devices is None else read(Count, devices, f"{where}: devices")
    groups, used = _sized(groups, wanted, where)
    levels = _levels(file.network, f"{where}: network", sum(group.count for group in groups))
    found = Topology(file.name, tuple(groups), levels, used)
    check_connected(found, where)
    return found


def _sized(groups: list[NodeGroup], wanted: int | None, where: str) -> tuple[list[NodeGroup], int]:
    total = sum(len(group.kind) * group.count for group in groups)
    used = total if wanted is None else wanted
    if used > total and len(groups) == 1:
        return [NodeGroup(groups[0].kind, ceil(used / len(groups[0].kind)))], used
    if used > total:
        raise UserError(
            f"{where}: there are {total} devices in nodes of {len(groups)} kinds, and {used} are asked for; "
            "write a file with more nodes"
        )
    found: list[NodeGroup] = []
    left = used
    for group in groups:
        count = min(group.count, ceil(left / len(group.kind)))
        if count > 0:
            found.append(NodeGroup(group.kind, count))
        left -= count * len(group.kind)
    return found, used


def _levels(
    entries: Sequence[Mapping[str, Any]], where: str, units: int
) -> tuple[NetworkLevel, ...]:
    found: list[NetworkLevel] = []
    for place, entry in enumerate(entries):
        found.append(read(NetworkLevel, {"nodes": units, **entry}, f"{where}[{place}]"))
        if {"uplink_gb_per_second", "oversubscription"} <= entry.keys():
            raise UserError(
                f"{where}[{place}]: give uplink_gb_per_second or oversubscription, not both"
            )
    if units == 1:
        return ()
    if not found:
        raise UserError(f"{where}: {units} nodes need at least one level, got none")
    for place, (below, level) in enumerate(pairwise(found), start=1):
        if level.nodes % below.nodes and level.nodes < units:
            raise UserError(
                f"{where}[{place}]: groups of {level.nodes} nodes are not made of whole groups of {below.nodes}"
            )
    # Levels that are above all nodes switch nothing.
    needed = next((i for i, level in enumerate(found) if level.nodes >= units), None)
    if needed is None:
        raise UserError(
            f"{where}: the top level joins {found[-1].nodes} of {units} nodes; leave out its nodes to join all"
        )
    return tuple(found[: needed + 1])


def _node(nodes: _Nodes, where: str, kinds: Mapping[str, LinkKind]) -> NodeKind:
    devices = list(_devices(nodes.devices, f"{where}: devices"))
    vertices = [name for name, _, _ in devices]
    graph = _NodeGraph([*vertices, *(each.name for each in nodes.switches)], kinds, where)
    links: list[NodeLink] = []
    for place, switch in enumerate(nodes.switches):
        joined = vertices if switch.joins == "devices" else switch.joins
        at = f"{where}: switches[{place}]"
        links += [graph.link((name, switch.name), switch, f"{at}: joins", at) for name in joined]
    for place, link in enumerate(nodes.links):
        at = f"{where}: links[{place}]"
        made = graph.link(link.between, link, f"{at}: between", at)
        links.append(replace(made, one_way=link.one_way, shared=link.shared))
    ports: list[NodePort] = []
    for place, port in enumerate(nodes.ports):
        ports += graph.ports(port, len(devices), f"{where}: ports[{place}]")
    return NodeKind(
        tuple(kind for _, kind, _ in devices),
        tuple(graph.places),
        tuple(links),
        tuple(ports),
        tuple(node for _, _, node in devices),
    )


def _devices(content: _Devices | Sequence[_Devices], where: str) -> list[tuple[str, str, int]]:
    """Name, kind and node of each device."""
    found: list[tuple[str, str, int]] = []
    for place, each in enumerate([content] if isinstance(content, _Devices) else content):
        at = where if isinstance(content, _Devices) else f"{where}[{place}]"
        try:
            device_kind(each.kind)
        except UserError as error:
            raise UserError(f"{at}: {error}") from error
        if each.name and each.count > 1:
            raise UserError(f"{at}: a name is for one device, got count {each.count}")
        for _ in range(each.count):
            found.append((each.name or f"device{len(found)}", each.kind, each.node))
        if len(found) > _MOST:
            raise UserError(f"{where}: a node has at most {_MOST} devices")
    nodes = [node for _, _, node in found]
    if nodes != sorted(nodes) or set(nodes) != set(range(nodes[-1] + 1)):
        raise wrong(f"{where}: node", "0, 1, … in the order of the devices", nodes)
    return found


@final
class _NodeGraph:
    """The devices and switches of a node, by name, and the kinds of links that may join them."""

    def __init__(self, vertices: list[str], kinds: Mapping[str, LinkKind], where: str) -> None:
        self.places = {name: place for place, name in enumerate(vertices)}
        self._kinds = kinds
        if len(self.places) < len(vertices):
            twice = next(name for name in vertices if vertices.count(name) > 1)
            raise UserError(f"{where}: name devices and switches apart, got {twice!r} twice")

    def link(self, ends: Sequence[str], entry: _Link | _Switch, named: str, where: str) -> NodeLink:
        """The link of an entry between two vertices, which are `named` there."""
        source, target = self._places(ends, named)
        if source == target:
            raise UserError(f"{where}: a link from {ends[0]!r} to itself")
        return NodeLink(source, target, self._kind(entry.link, where), entry.width)

    def ports(self, entry: _Ports, devices: int, where: str) -> list[NodePort]:
        """The ports of an entry."""
        kind = self._kind(entry.link, where)
        if entry.at is not None:
            if entry.count is not None:
                raise UserError(
                    f"{where}: give the vertices that a port is at, or a count, not both"
                )
            return [NodePort(kind, entry.width, self._places(entry.at, f"{where}: at"))]
        count = 1 if entry.count is None else entry.count
        count = read(Annotated[int, Bounds(least=1, most=devices)], count, f"{where}: count")
        bounds = [place * devices // count for place in range(count + 1)]
        return [NodePort(kind, entry.width, tuple(range(a, b))) for a, b in pairwise(bounds)]

    def _places(self, names: Sequence[str], where: str) -> tuple[int, ...]:
        check_known(names, self.places, where, "device or switch")
        return tuple(self.places[name] for name in names)

    def _kind(self, link: str | None, where: str) -> LinkKind:
        name = read(str, link, f"{where}: link")
        check_known([name], self._kinds, where, "link kind")
        return self._kinds[name]


@cache
def link_kinds(calibrated: bool = True) -> Mapping[str, LinkKind]:
    """The catalogue's kinds by name; with `calibrated=False`, from their published figures alone."""
    return {
        name: parse_link_kind(name, fields, f"{LINKS}: {name}", calibrated)
        for name, fields in read_yaml(LINKS).items()
    }


def parse_link_kind(name: str, content: Any, where: str, calibrated: bool = True) -> LinkKind:
    """A kind from the content of a file; `where` is named in errors.

    Raises:
        UserError: when a field is missing, unknown or out of range.
    """
    fields = dict(read(Mapping[str, Any], content, where))
    fitted = read(_Fitted, fields.pop("calibrated", {}), f"{where}: calibrated")
    given = {**fields, **(fitted if calibrated else {}), "name": name}
    given.pop("source", None)
    return read(LinkKind, given, where)


# For a kind of link, what is fitted to measurements.
_Fitted = Mapping[Annotated[str, OneOf(("protocols", "own_gb_per_second", "source"))], Any]


def check_connected(topology: Topology, where: str) -> None:
    """Accepts a topology in which bytes get from every device to every other one.

    Raises:
        UserError: when some do not.
    """
    networked = sum(group.count for group in topology.groups) > 1
    for place, group in enumerate(topology.groups):
        at = f"{where}: nodes[{place}]"
        there, back = _Reach(group.kind, forward=True), _Reach(group.kind, forward=False)
        ports = {vertex for port in group.kind.ports for vertex in port.at}
        for device in range(len(group.kind)):
            missing = set(range(len(group.kind))) - there.of(device)
            if missing:
                ends = group.kind.vertices[device], group.kind.vertices[min(missing)]
                raise UserError(
                    f"{at}: no links lead from {ends[0]} to {ends[1]}; "
                    "bytes pass through switches, not through devices"
                )
            if networked and not (ports & there.of(device) and ports & back.of(device)):
                raise UserError(
                    f"{at}: {group.kind.vertices[device]} reaches no port, and there are other nodes; "
                    "add ports, such as {link: ethernet-100g}"
                )
    kinds = topology.link_kinds
    if not common_protocols(kinds):
        names = ", ".join(f"{kind.name} ({', '.join(kind.protocols)})" for kind in kinds)
        raise UserError(f"{where}: give the links a protocol in common, got {names}")


@final
class _Reach:
    """The vertices that a device's bytes get to, or come from; those at the same switches share the search."""

    def __init__(self, kind: NodeKind, forward: bool) -> None:
        self._devices = len(kind)
        self._near: list[set[int]] = [set() for _ in kind.vertices]
        self._found: dict[frozenset[int], set[int]] = {}
        for link in kind.links:
            if forward or not link.one_way:
                self._near[link.source].add(link.target)
            if not forward or not link.one_way:
                self._near[link.target].add(link.source)

    def of(self, device: int) -> set[int]:
        near = self._near[device]
        switches = frozenset(vertex for vertex in near if vertex >= self._devices)
        if switches not in self._found:
            self._found[switches] = self._search(switches)
        return self._found[switches] | near | {device}

    def _search(self, switches: Iterable[int]) -> set[int]:
        found, left = set(switches), list(switches)
        while left:
            vertex = left.pop()
            if vertex >= self._devices:
                left.extend(self._near[vertex] - found)
                found |= self._near[vertex]
        return found


def topologies() -> tuple[str, ...]:
    """The names of the catalogue's topologies, in order."""
    return tuple(sorted(path.stem for path in TOPOLOGIES.glob("*.yaml")))


def topology(what: str | Path | Topology, calibrated: bool = True) -> Topology:
    """A topology by its name in the catalogue, from a file, or as it is.

    Args:
        what: a name of the catalogue, optionally with a number of devices ("h100x512"); the
            path of a `.yaml` file; or a topology.
        calibrated: False uses only the published figures of links.

    Raises:
        UserError: when there is none of this name, or the file cannot be read or is not legal.
    """
    if isinstance(what, Topology):
        return what
    if not isinstance(what, str | Path):
        expected = (
            "a name of the catalogue, such as 'h100x8', the path of a .yaml file or a Topology"
        )
        raise wrong("a topology", expected, what)
    if isinstance(what, Path) or what.endswith((".yaml", ".yml")):
        return parse_topology(read_yaml(Path(what)), str(what), None, calibrated)
    names = topologies()
    sized = _SIZED.fullmatch(what)
    name, devices = what, None
    if what not in names and sized is not None:
        name, devices = sized["name"], int(sized["devices"])
    check_known([name], names, "topology", "topology")
    path = TOPOLOGIES / f"{name}.yaml"
    return parse_topology(read_yaml(path), what, devices, calibrated)
