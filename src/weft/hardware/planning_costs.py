"""Costs on a topology, and the choice of the costs that a step is planned with on this machine.

On a topology calls take the seconds of each device's kind, exchanges those of the links between the devices. Without
a topology, costs are, on CPUs, those that `weft measure` keeps of the machine (`weft.hardware.measured_costs`); on CUDA
those of the catalogue, by the name of the device; else the usual figures of the device type. A topology that is named
is planned by its own costs. With `WEFT_PLAN_COSTS=usual` nothing that was measured counts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import final

from weft.cached import cached_property
from weft.errors import UserError, wrong
from weft.hardware.collectives import (
    CollectiveLinks,
    TransferLinks,
    collective_seconds,
    transfer_seconds,
)
from weft.hardware.costs import (
    Capacity,
    Contention,
    Cost,
    Costs,
    DefaultDevice,
    Groups,
    Sent,
    default_device,
    is_launched,
    links_text,
)
from weft.hardware.devices import (
    DeviceKind,
    call_seconds,
    device_kind,
    read_yaml,
    update_seconds,
    without_peak,
)
from weft.hardware.measured_costs import MeasuredCosts
from weft.hardware.measured_store import load_measurements
from weft.hardware.topology import Topology
from weft.hardware.topology_files import topology
from weft.ir.plan_nodes import CollectiveKind
from weft.ops import OpCall, has_rule, runs_whole
from weft.ops.weft_ops import WEFT_OPS
from weft.schema import read
from weft.units import Bytes, Seconds

PLAN_COSTS = "WEFT_PLAN_COSTS"
_CHOICES = ("measured", "usual")
_NAMES = Path(__file__).parent / "catalogue" / "device_names.yaml"
# A communication of its own takes so much longer than its bytes alone.
_OVERHEAD = 1.05
_LARGE = Bytes(2**32)


def takes_measured(environment: Mapping[str, str]) -> bool:
    """True if plans take what was measured of this machine.

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
    """The costs of the devices available; None if only their type is known. It reads files and measures nothing.

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
    """The least bytes for a separate all-reduce, whose latency is a twentieth of its time; rounded to two digits.

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


@final
@dataclass(frozen=True)
class TopologyCosts:
    """The seconds of calls, updates and exchanges on the devices of a topology: `weft.hardware.costs.Costs`.

    Attributes:
        topology: rank r runs on device r of it.
    """

    topology: Topology

    @cached_property
    def device_type(self) -> str:
        """The type of all its devices.

        Raises:
            UserError: when it has devices of several types.
        """
        names = {name for group in self.topology.groups for name in group.kind.kinds}
        found = sorted({device_kind(name).device_type for name in names})
        if len(found) > 1:
            raise UserError(
                f"the topology {self.topology.name} has devices of the types {' and '.join(found)}; a plan runs on "
                "devices of one type"
            )
        return found[0]

    @cached_property
    def _first(self) -> dict[str, int]:
        """For each kind the first rank that was asked for."""
        return {}

    def kind(self, rank: int) -> DeviceKind:
        """The kind of a rank's device."""
        return self.topology.kind(rank)

    def kinds(self, ranks: Sequence[int]) -> dict[int, int]:
        """For each rank the number of its device's kind, where they have several kinds; else nothing."""
        names = {name for group in self.topology.groups for name in group.kind.kinds}
        if len(names) == 1:
            return {}
        numbers: dict[str, int] = {}
        return {rank: numbers.setdefault(self.kind(rank).name, len(numbers)) for rank in ranks}

    def like(self, rank: int) -> int:
        return self._first.setdefault(self.kind(rank).name, rank)

    def capacity(self, rank: int) -> Capacity:
        kind = self.kind(rank)
        launched = is_launched(kind.device_type)
        return Capacity(
            kind.name,
            kind.peaks,
            kind.memory,
            kind.reserve,
            Contention(kind.slowdown),
            launched=launched,
        )

    def of_call(self, rank: int, call: OpCall, lies: Sequence[str] = ()) -> Cost:
        """One call; of an op without a rule an estimate: it reads and writes its tensors once."""
        known = has_rule(call.op) or runs_whole(call.op) or call.op in WEFT_OPS
        if not known:
            missing = f"{call.op} has no rule: it reads and writes its tensors once"
            return Cost(call_seconds(self.kind(rank), call), estimate=missing)
        return Cost(
            call_seconds(self.kind(rank), call), estimate=without_peak(self.kind(rank), call)
        )

    def of_update(self, rank: int, rule: str, moved: Bytes, together: int = 1) -> Cost:
        return Cost(update_seconds(self.kind(rank), moved))

    def of_act(self, rank: int) -> Seconds:
        return self.kind(rank).act

    def of_collective(
        self, kind: CollectiveKind, size: Bytes, moved: Bytes, groups: Groups
    ) -> Cost:
        """A collective of all groups at the same time, over the links that they share."""
        every = tuple(tuple(group) for group in groups)
        seconds = collective_seconds(self.topology, kind, size, every)
        return Cost(seconds, links=CollectiveLinks(self.topology, kind, size, every))

    def of_transfer(self, sent: Sent, moved: Bytes) -> Cost:
        """A transfer between placements, over the links that its pieces share."""
        links = TransferLinks(self.topology, tuple(sent))
        return Cost(transfer_seconds(self.topology, sent), links=links)
