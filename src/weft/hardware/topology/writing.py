"""The text of a topology: YAML that reads back as an equal one, and needs no catalogue of links."""

from __future__ import annotations

from math import inf, nextafter
from typing import Any

import yaml

from weft.hardware.topology.machine import (
    LinkKind,
    LinkProtocol,
    NetworkLevel,
    NodeKind,
    NodeLink,
    NodePort,
    Topology,
)
from weft.hardware.topology.reading import VERSION


def topology_text(topology: Topology) -> str:
    """A topology as YAML."""
    content = {
        "weft_topology": VERSION,
        "name": topology.name,
        "devices": topology.devices,
        "links": {kind.name: _kind(kind) for kind in topology.link_kinds},
        "nodes": [{"count": group.count, **_node(group.kind)} for group in topology.groups],
        "network": [_level(level) for level in topology.levels],
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


def _level(level: NetworkLevel) -> dict[str, Any]:
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
        for number in (down, up):
            if unit * number == value:
                return number
        down, up = nextafter(down, -inf), nextafter(up, inf)
    return value / unit
