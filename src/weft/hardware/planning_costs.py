"""The one place that decides by which costs a step is planned on the devices at hand.

On CPUs those that `weft measure` keeps of the machine, settled (`weft.hardware.measured_costs`); on CUDA those of the
catalogue, by the name of the device; else the usual figures of the device type. A topology that is named is planned by
its own costs. With `WEFT_PLAN_COSTS=usual` nothing that was measured counts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from weft.errors import wrong
from weft.hardware.costs import Costs
from weft.hardware.default_costs import DefaultDevice, default_device, links_text
from weft.hardware.kinds.device_kinds import read_yaml
from weft.hardware.measured_costs import MeasuredCosts
from weft.hardware.measured_store import load_measurements
from weft.hardware.topology import topology
from weft.hardware.topology_costs import TopologyCosts
from weft.schema import read
from weft.units import Bytes

PLAN_COSTS = "WEFT_PLAN_COSTS"
_CHOICES = ("measured", "usual")
_NAMES = Path(__file__).parent / "catalogue" / "device_names.yaml"
# A communication of its own takes so much longer than its bytes alone.
_OVERHEAD = 1.05
_LARGE = Bytes(2**32)


def takes_measured(environment: Mapping[str, str]) -> bool:
    """True where plans take what was measured of this machine.

    Raises:
        UserError: the variable holds something else than its values.
    """
    found = environment.get(PLAN_COSTS) or _CHOICES[0]
    if found not in _CHOICES:
        raise wrong(PLAN_COSTS, " or ".join(_CHOICES), found)
    return found == "measured"


def costs_at_hand(
    device_type: str, ranks: int, processes: int, threads: int, device_name: str
) -> Costs | None:
    """The costs of the devices at hand; None where no more is known than their type. Reads files, measures nothing.

    Args:
        device_type: "cpu" or "cuda".
        ranks: at work at the same time.
        processes: that they run in.
        threads: of each rank.
        device_name: as PyTorch names the first rank's device; "" for CPUs.

    Raises:
        UserError: a file is damaged, or `WEFT_PLAN_COSTS` is none of its values.
    """
    if not takes_measured(os.environ):
        return None
    found = load_measurements(ranks, device_type, processes, threads, planned=True)
    return found if found is not None else catalogue_costs(device_name, ranks)


def catalogue_costs(device_name: str, ranks: int) -> TopologyCosts | None:
    """The costs of so many devices of a name, as machines of the catalogue connect them; None for other devices."""
    name = _topologies().get(device_name)
    return None if name is None else TopologyCosts(topology(f"{name}x{ranks}"))


@cache
def _topologies() -> dict[str, str]:
    """The topology of the catalogue for each name of a device."""
    found: dict[str, str] = read(Mapping[str, str], read_yaml(_NAMES), str(_NAMES))
    return found


def behind_links(costs: Costs | None, links: DefaultDevice | None) -> Costs | None:
    """Costs where ranks run on several hosts, the links between which were measured; `links` is None on one host."""
    if links is None or not isinstance(costs, MeasuredCosts):
        return links or costs
    return replace(costs.device, link=links.link, latency=links.latency)


def costs_text(costs: Costs | None) -> str:
    """The source of costs, in words."""
    match costs:
        case None:
            return "usual devices"
        case DefaultDevice():
            return f"links as measured: {links_text(costs)}"
        case MeasuredCosts():
            return "this machine as measured"
    return f"{costs.capacity(0).name} of the catalogue"


def costs_or_usual(costs: Costs | None, device_type: str) -> Costs:
    """Costs, or those of the usual device of a type."""
    return default_device(device_type) if costs is None else costs


def bucket_bytes(costs: Costs, ranks: tuple[int, ...]) -> Bytes:
    """Bytes that are worth an all-reduce of their own: latency is a twentieth of its seconds. To two digits.

    Args:
        costs: of the machine.
        ranks: that communicate.
    """

    def seconds(size: int) -> float:
        return costs.of_collective("all_reduce", Bytes(size), Bytes(size), [ranks]).seconds

    slope = (seconds(2 * _LARGE) - seconds(_LARGE)) / _LARGE
    low, high = 0, int(_LARGE)
    while high - low > 1 + low // 1000:
        size = (low + high) // 2
        low, high = (low, size) if seconds(size) <= _OVERHEAD * slope * size else (size, high)
    return Bytes(int(float(f"{high:.2g}")))
