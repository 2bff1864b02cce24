"""A node's devices, links and ports from the content of a file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, final

from weft.errors import UserError
from weft.hardware.fields import (
    SLOWEST,
    amount,
    mapping,
    meant,
    number,
    read_yaml,
    sequence,
    shown,
    whole,
    word,
)
from weft.hardware.kinds.device_kinds import device_kind
from weft.hardware.topology.machine import ANY, LinkKind, LinkProtocol, NodeKind, NodeLink, NodePort
from weft.units import Seconds

Kinds: TypeAlias = Mapping[str, LinkKind]
_KEYS = ("count", "devices", "switches", "links", "ports")
_DEVICES = ("kind", "count", "name", "node")
_SWITCH = ("name", "link", "width", "joins")
_LINK = ("between", "link", "width", "one_way", "shared")
_PORT = ("link", "width", "count", "at")
_MOST = 4096


def parse_node(content: Any, where: str, kinds: Kinds) -> NodeKind:
    """A kind of node; `kinds` are the links that it may name.

    Raises:
        UserError: when a field is missing, unknown or out of range, or a link leads nowhere.
    """
    fields = mapping(content, where, _KEYS)
    devices = _devices(fields.get("devices"), f"{where}: devices")
    switches = sequence(fields.get("switches", []), f"{where}: switches", _MOST)
    names = [name for name, _, _ in devices]
    vertices = (
        *names,
        *(_switch_name(one, f"{where}: switches", i) for i, one in enumerate(switches)),
    )
    places = {name: place for place, name in enumerate(vertices)}
    if len(places) < len(vertices):
        twice = next(name for name in vertices if vertices.count(name) > 1)
        raise UserError(f"{where}: name devices and switches apart, found {twice!r} twice")
    reader = _NodeReader(places, len(names), kinds)
    links: list[NodeLink] = []
    for place, one in enumerate(switches):
        links += reader.joined(one, f"{where}: switches[{place}]")
    for place, one in enumerate(sequence(fields.get("links", []), f"{where}: links")):
        links.append(reader.link(one, f"{where}: links[{place}]"))
    ports: list[NodePort] = []
    for place, one in enumerate(sequence(fields.get("ports", []), f"{where}: ports", _MOST)):
        ports += reader.ports(one, f"{where}: ports[{place}]")
    return NodeKind(
        tuple(kind for _, kind, _ in devices),
        vertices,
        tuple(links),
        tuple(ports),
        tuple(node for _, _, node in devices),
    )


def _devices(content: Any, where: str) -> list[tuple[str, str, int]]:
    """Name, kind and node of each device."""
    found: list[tuple[str, str, int]] = []
    entries = content if isinstance(content, list) else [content]
    for place, one in enumerate(sequence(entries, where, _MOST)):
        at = f"{where}[{place}]" if isinstance(content, list) else where
        fields = mapping(one, at, _DEVICES)
        kind = word(fields, "kind", at)
        try:
            device_kind(kind)
        except UserError as error:
            raise UserError(f"{at}: {error}") from error
        count = whole(fields, "count", at, 1, _MOST)
        if "name" in fields and count > 1:
            raise UserError(f"{at}: a name is for one device; found count {count}")
        node = whole({"node": _next(fields.get("node", 0))}, "node", at) - 1
        for _ in range(count):
            name = word(fields, "name", at) if "name" in fields else f"device{len(found)}"
            found.append((name, kind, node))
            if len(found) > _MOST:
                raise UserError(f"{where}: a node has at most {_MOST} devices")
    if not found:
        raise UserError(f"{where}: expected at least one device")
    nodes = [node for _, _, node in found]
    if nodes != sorted(nodes) or set(nodes) != set(range(nodes[-1] + 1)):
        raise UserError(
            f"{where}: nodes are numbered 0, 1, … in the order of the devices; found {shown(nodes)}"
        )
    return found


def _next(value: Any) -> Any:
    return value + 1 if isinstance(value, int) and not isinstance(value, bool) else value


def _switch_name(content: Any, where: str, place: int) -> str:
    at = f"{where}[{place}]"
    return word(mapping(content, at, _SWITCH), "name", at)


@final
class _NodeReader:
    """Reads links and ports, given the places of a node's vertices by name."""

    def __init__(self, places: Mapping[str, int], devices: int, kinds: Kinds) -> None:
        self._places = places
        self._devices = devices
        self._kinds = kinds

    def joined(self, content: Any, where: str) -> list[NodeLink]:
        """The links of a switch to what it joins."""
        fields = mapping(content, where, _SWITCH)
        joins = fields.get("joins", [])
        if joins == "devices":
            joins = list(self._places)[: self._devices]
        names = sequence(joins, f"{where}: joins", _MOST)
        if not names:
            return []
        kind, width = self._kind(fields, where), _width(fields, where)
        switch = self._places[fields["name"]]
        return [
            self._checked(self._place(name, f"{where}: joins"), switch, kind, width, where)
            for name in names
        ]

    def link(self, content: Any, where: str) -> NodeLink:
        """One entry of `links`."""
        fields = mapping(content, where, _LINK)
        ends = sequence(fields.get("between"), f"{where}: between")
        if len(ends) != 2:
            raise UserError(f"{where}: between names two devices or switches; found {shown(ends)}")
        source, target = (self._place(name, f"{where}: between") for name in ends)
        one_way = fields.get("one_way", False)
        if not isinstance(one_way, bool):
            raise UserError(f"{where}: one_way is true or false; found {shown(one_way)}")
        shared = word(fields, "shared", where) if "shared" in fields else ""
        kind, width = self._kind(fields, where), _width(fields, where)
        self._checked(source, target, kind, width, where)
        return NodeLink(source, target, kind, width, one_way, shared)

    def ports(self, content: Any, where: str) -> list[NodePort]:
        """Ports at vertices that are named, or `count` of them, each at an equal part of the devices."""
        fields = mapping(content, where, _PORT)
        kind, width = self._kind(fields, where), _width(fields, where)
        if "at" in fields:
            names = sequence(fields["at"], f"{where}: at", _MOST)
            if not names or "count" in fields:
                raise UserError(
                    f"{where}: a port is at named vertices, or several are counted; found {shown(content)}"
                )
            return [
                NodePort(kind, width, tuple(self._place(name, f"{where}: at") for name in names))
            ]
        count = whole(fields, "count", where, 1, self._devices)
        bounds = [place * self._devices // count for place in range(count + 1)]
        return [NodePort(kind, width, tuple(range(a, b))) for a, b in pairwise(bounds)]

    def _checked(
        self, source: int, target: int, kind: LinkKind, width: float, where: str
    ) -> NodeLink:
        if source == target:
            raise UserError(f"{where}: a link from {list(self._places)[source]!r} to itself")
        return NodeLink(source, target, kind, width)

    def _place(self, name: Any, where: str) -> int:
        if not isinstance(name, str) or name not in self._places:
            raise UserError(
                f"{where}: no device or switch is named {shown(name)}{meant(name, self._places)}"
            )
        return self._places[name]

    def _kind(self, fields: Mapping[str, Any], where: str) -> LinkKind:
        name = word(fields, "link", where)
        if name not in self._kinds:
            raise UserError(
                f"{where}: no link kind is named {shown(name)}{meant(name, self._kinds)}"
            )
        return self._kinds[name]


def _width(fields: Mapping[str, Any], where: str) -> float:
    return number(fields, "width", where, 1.0, most=1e6)


LINKS = Path(__file__).parents[1] / "catalogue" / "links.yaml"
_FITTED = ("protocols", "own_gb_per_second")
_LINK_KEYS = (
    *("gb_per_second", "latency_microseconds", "in_flight", "in_switch"),
    *(*_FITTED, "source", "calibrated"),
)
_PROTOCOL = ("base_microseconds", "hop_microseconds", "share")
# More than the protocols of any library.
_MOST_PROTOCOLS = 16
# One protocol that reaches the whole rate at once, for kinds that name none.
_IDEAL: Mapping[str, Any] = {ANY: {}}


@cache
def link_kinds(calibrated: bool = True) -> Mapping[str, LinkKind]:
    """The catalogue's kinds by name; with `calibrated=False`, from their published figures alone."""
    content = mapping(read_yaml(LINKS), str(LINKS))
    return {
        name: parse_link_kind(name, fields, f"{LINKS}: {name}", calibrated)
        for name, fields in content.items()
    }


def parse_link_kind(name: str, content: Any, where: str, calibrated: bool = True) -> LinkKind:
    """A kind from the content of a file; `where` is named in errors.

    Raises:
        UserError: when a field is missing, unknown or out of range.
    """
    fields = dict(mapping(content, where, _LINK_KEYS))
    fitted = mapping(fields.get("calibrated", {}), f"{where}: calibrated", (*_FITTED, "source"))
    if calibrated:
        fields.update(fitted)
    at = f"{where}: protocols"
    protocols = mapping(fields.get("protocols", _IDEAL), at)
    if not 1 <= len(protocols) <= _MOST_PROTOCOLS:
        raise UserError(f"{at}: expected 1 to {_MOST_PROTOCOLS}, found {len(protocols)}")
    own = "own_gb_per_second"
    return LinkKind(
        name=name,
        rate=1e9 * number(fields, "gb_per_second", where, above=SLOWEST, most=1e12),
        latency=microseconds(fields, "latency_microseconds", where),
        protocols={each: _protocol(fields, f"{at}: {each}") for each, fields in protocols.items()},
        in_flight=whole(fields, "in_flight", where, 1),
        own=1e9 * number(fields, own, where, above=SLOWEST, most=1e12) if own in fields else None,
        in_switch=_in_switch(fields, where),
    )


def _in_switch(fields: Mapping[str, Any], where: str) -> LinkProtocol | None:
    key = "in_switch"
    return _protocol(fields[key], f"{where}: {key}") if key in fields else None


def _protocol(content: Any, where: str) -> LinkProtocol:
    fields = mapping(content, where, _PROTOCOL)
    return LinkProtocol(
        microseconds(fields, "base_microseconds", where),
        microseconds(fields, "hop_microseconds", where),
        number(fields, "share", where, 1.0, above=1e-6, most=1.0),
    )


def microseconds(fields: Mapping[str, Any], key: str, where: str) -> Seconds:
    """The seconds that a field says in microseconds, 0 where there is none."""
    found = amount(fields, key, where, 0.0)
    if found > 1e9:
        raise UserError(f"{where}: {key} is at most 1e9; found {found:g}")
    return Seconds(1e-6 * found)
