"""The catalogue of topologies, and topology(), which takes one from it or from a file."""

from __future__ import annotations

import re
from pathlib import Path

from weft.errors import UserError
from weft.hardware.fields import meant, read_yaml
from weft.hardware.topology.machine import Topology
from weft.hardware.topology.reading import parse_topology

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
