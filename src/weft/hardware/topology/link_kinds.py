"""The catalogue of link kinds, and the reader of their figures.

A kind stands with its published figures; what was fitted to measurements stands under `calibrated`, and is taken in
their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from weft.errors import UserError
from weft.hardware.fields import SLOWEST, amount, mapping, number, read_yaml, whole
from weft.hardware.topology.machine import ANY, LinkKind, LinkProtocol
from weft.units import Seconds

LINKS = Path(__file__).parents[1] / "catalogue" / "links.yaml"
_FITTED = ("protocols", "own_gb_per_second")
_KEYS = (
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
    fields = dict(mapping(content, where, _KEYS))
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
