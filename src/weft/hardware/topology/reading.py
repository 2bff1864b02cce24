"""A topology from the content of a file, checked whole: what leaves here is legal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from math import ceil, inf, nextafter
from pathlib import Path
from typing import Any, final

import yaml

from weft.errors import UserError
from weft.hardware.fields import (
    SLOWEST,
    mapping,
    meant,
    number,
    read_yaml,
    sequence,
    shown,
    whole,
    word,
)
from weft.hardware.topology.machine import (
    LinkKind,
    LinkProtocol,
    NetworkLevel,
    NodeGroup,
    NodeKind,
    NodeLink,
    NodePort,
    Topology,
    common_protocols,
)
from weft.hardware.topology.reading_nodes import (
    link_kinds,
    microseconds,
    parse_link_kind,
    parse_node,
)

# The version of the format that is read and written.
VERSION = 1
_KEYS = ("weft_topology", "name", "source", "links", "nodes", "network", "devices")
_LEVEL = ("name", "nodes", "latency_microseconds", "uplink_gb_per_second", "oversubscription")
_MOST_DEVICES = 1 << 20
_MOST_GROUPS = 1024
_MOST_LEVELS = 16


def parse_topology(
    content: Any, where: str, devices: int | None = None, calibrated: bool = True
) -> Topology:
    """A topology from the content of a file.

    Args:
        content: what the file holds, as plain data.
        where: named in errors.
        devices: how many are wanted; the file's nodes become more, or fewer.
        calibrated: False takes the links of the catalogue with their published figures alone.

    Raises:
        UserError: when a field is missing, unknown or out of range, a link leads nowhere, or devices do not reach one
            another.
    """
    fields = mapping(content, where, _KEYS)
    version = fields.get("weft_topology")
    if version != VERSION or isinstance(version, bool):
        other = shown(version)
        raise UserError(
            f"{where}: expected weft_topology: {VERSION}, the version of the format; found {other}"
        )
    kinds = _links(fields.get("links", {}), f"{where}: links", calibrated)
    entries = sequence(fields.get("nodes"), f"{where}: nodes", _MOST_GROUPS)
    groups = tuple(_group(one, f"{where}: nodes[{i}]", kinds) for i, one in enumerate(entries))
    if not groups:
        raise UserError(f"{where}: nodes: expected at least one")
    wanted = devices if devices is not None else fields.get("devices")
    groups, used = _sized(groups, wanted, where)
    units = sum(group.count for group in groups)
    network = sequence(fields.get("network", []), f"{where}: network", _MOST_LEVELS)
    levels = _levels(network, f"{where}: network", units)
    found = Topology(word(fields, "name", where), groups, levels, used)
    check_reach(found, where)
    return found


def _links(content: Any, where: str, calibrated: bool) -> Mapping[str, LinkKind]:
    own = mapping(content, where)
    found = dict(link_kinds(calibrated))
    for name, fields in own.items():
        found[name] = parse_link_kind(name, fields, f"{where}: {name}", calibrated)
    return found


def _group(content: Any, where: str, kinds: Mapping[str, LinkKind]) -> NodeGroup:
    fields = mapping(content, where)
    return NodeGroup(parse_node(fields, where, kinds), whole(fields, "count", where, 1))


def _sized(
    groups: tuple[NodeGroup, ...], wanted: Any, where: str
) -> tuple[tuple[NodeGroup, ...], int]:
    """As many nodes as the devices that are wanted need, and how many devices are used."""
    total = sum(len(group.kind) * group.count for group in groups)
    if wanted is None:
        wanted = total
    used = whole({"devices": wanted}, "devices", where, most=_MOST_DEVICES)
    if used > total and len(groups) == 1:
        return (NodeGroup(groups[0].kind, ceil(used / len(groups[0].kind))),), used
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
    return tuple(found), used


def _levels(entries: list[Any], where: str, units: int) -> tuple[NetworkLevel, ...]:
    found = [_level(one, f"{where}[{i}]", units) for i, one in enumerate(entries)]
    if units == 1:
        return ()
    if not found:
        raise UserError(f"{where}: {units} nodes need at least one level; found none")
    for place, (below, level) in enumerate(pairwise(found), start=1):
        if level.nodes % below.nodes and level.nodes < units:
            raise UserError(
                f"{where}[{place}]: groups of {level.nodes} nodes are not made of whole groups of {below.nodes}"
            )
    # Levels that lie above all nodes switch nothing.
    needed = next((i for i, level in enumerate(found) if level.nodes >= units), None)
    if needed is None:
        raise UserError(
            f"{where}: the top level joins {found[-1].nodes} of {units} nodes; leave out its nodes to join all"
        )
    return tuple(found[: needed + 1])


def _level(content: Any, where: str, units: int) -> NetworkLevel:
    fields = mapping(content, where, _LEVEL)
    uplink = "uplink_gb_per_second"
    if uplink in fields and "oversubscription" in fields:
        raise UserError(f"{where}: give {uplink} or oversubscription, not both")
    return NetworkLevel(
        word(fields, "name", where),
        whole(fields, "nodes", where, units),
        microseconds(fields, "latency_microseconds", where),
        1e9 * number(fields, uplink, where, above=SLOWEST, most=1e12) if uplink in fields else None,
        number(fields, "oversubscription", where, 1.0, most=1e6),
    )


def check_reach(topology: Topology, where: str) -> None:
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
            _check_device(group.kind, device, there, at)
            if networked and not (ports & there.of(device) and ports & back.of(device)):
                raise UserError(
                    f"{at}: {group.kind.vertices[device]} reaches no port, and there are other nodes; "
                    "add ports, such as {link: ethernet-100g}"
                )
    kinds = topology.link_kinds
    if not common_protocols(kinds):
        names = ", ".join(f"{kind.name} ({', '.join(kind.protocols)})" for kind in kinds)
        raise UserError(f"{where}: give the links a protocol in common, found {names}")


def _check_device(kind: NodeKind, device: int, there: _Reach, where: str) -> None:
    missing = set(range(len(kind))) - there.of(device)
    if missing:
        raise UserError(
            f"{where}: no links lead from {kind.vertices[device]} to {kind.vertices[min(missing)]}; "
            "bytes pass through switches, not through devices"
        )


@final
class _Reach:
    """The vertices that a device's bytes get to, or come from; those at the same switches share the search."""

    def __init__(self, kind: NodeKind, forward: bool) -> None:
        self._devices = len(kind)
        self._near: list[set[int]] = [set() for _ in kind.vertices]
        self._found: dict[frozenset[int], set[int]] = {}
        for source, target in _directed(kind):
            a, b = (source, target) if forward else (target, source)
            self._near[a].add(b)

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


def _directed(kind: NodeKind) -> Iterator[tuple[int, int]]:
    for link in kind.links:
        yield link.source, link.target
        if not link.one_way:
            yield link.target, link.source


TOPOLOGIES = Path(__file__).parents[1] / "catalogue" / "topologies"
_SIZED = re.compile(r"(?P<name>.+)x(?P<devices>\d{1,100})", re.ASCII)


def topologies() -> tuple[str, ...]:
    """The names of the catalogue's topologies, in order."""
    return tuple(sorted(path.stem for path in TOPOLOGIES.glob("*.yaml")))


def topology(what: str | Path | Topology, calibrated: bool = True) -> Topology:
    """A topology by its name in the catalogue, from a file, or as it is.

    Args:
        what: a name, with a number of devices behind an x where the catalogue's number is not meant ("h100x512"); the
            path of a `.yaml` file; or a topology.
        calibrated: False takes the links with their published figures alone.

    Raises:
        UserError: when there is none of this name, or the file cannot be read or is not legal.
    """
    if isinstance(what, Topology):
        return what
    if not isinstance(what, str | Path):
        raise UserError(
            "a topology is a name of the catalogue, such as 'h100x8', the path of a .yaml file or a Topology, "
            f"found {what!r}"
        )
    if isinstance(what, Path) or what.endswith((".yaml", ".yml")):
        return parse_topology(read_yaml(Path(what)), str(what), None, calibrated)
    names = topologies()
    sized = _SIZED.fullmatch(what)
    name, devices = what, None
    if what not in names and sized is not None:
        name, devices = sized["name"], int(sized["devices"])
    if name not in names:
        raise UserError(f"no topology is named {name!r}{meant(name, names)}")
    path = TOPOLOGIES / f"{name}.yaml"
    return parse_topology(read_yaml(path), what, devices, calibrated)


def topology_text(topology: Topology) -> str:
    """A topology as YAML."""
    content = {
        "weft_topology": VERSION,
        "name": topology.name,
        "devices": topology.devices,
        "links": {kind.name: _kind(kind) for kind in topology.link_kinds},
        "nodes": [{"count": group.count, **_node(group.kind)} for group in topology.groups],
        "network": [_level_fields(level) for level in topology.levels],
    }
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120)


def _kind(kind: LinkKind) -> dict[str, Any]:
    own: dict[str, Any] = {} if kind.own is None else {"own_gb_per_second": _over(kind.own, 1e9)}
    if kind.in_switch is not None:
        own["in_switch"] = _protocol(kind.in_switch)
    return {
        "gb_per_second": _over(kind.rate, 1e9),
        "latency_microseconds": _over(kind.latency, 1e-6),
        "in_flight": kind.in_flight,
        "protocols": {name: _protocol(one) for name, one in kind.protocols.items()},
        **own,
    }


def _protocol(protocol: LinkProtocol) -> dict[str, float]:
    return {
        "base_microseconds": _over(protocol.base, 1e-6),
        "hop_microseconds": _over(protocol.hop, 1e-6),
        "share": protocol.share,
    }


def _node(kind: NodeKind) -> dict[str, Any]:
    devices = zip(kind.vertices, kind.kinds, kind.nodes, strict=False)
    return {
        "devices": [{"name": name, "kind": one, "node": node} for name, one, node in devices],
        "switches": [{"name": name} for name in kind.vertices[len(kind) :]],
        "links": [_link(link, kind) for link in kind.links],
        "ports": [_port(port, kind) for port in kind.ports],
    }


def _link(link: NodeLink, kind: NodeKind) -> dict[str, Any]:
    return {
        "between": [kind.vertices[link.source], kind.vertices[link.target]],
        "link": link.link.name,
        "width": link.width,
        **({"one_way": True} if link.one_way else {}),
        **({"shared": link.shared} if link.shared else {}),
    }


def _port(port: NodePort, kind: NodeKind) -> dict[str, Any]:
    return {
        "link": port.link.name,
        "width": port.width,
        "at": [kind.vertices[place] for place in port.at],
    }


def _level_fields(level: NetworkLevel) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": level.name,
        "nodes": level.nodes,
        "latency_microseconds": _over(level.latency, 1e-6),
    }
    if level.uplink is not None:
        found["uplink_gb_per_second"] = _over(level.uplink, 1e9)
    else:
        found["oversubscription"] = level.oversubscription
    return found


def _over(value: float, unit: float) -> float:
    """The number of units that reads back as just this value."""
    down = up = value / unit
    for _ in range(4):
        for found in (down, up):
            if unit * found == value:
                return found
        down, up = nextafter(down, -inf), nextafter(up, inf)
    return value / unit
