"""Seconds of communication on a topology, and the links that it needs."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

import numpy as np

from weft.errors import UserError
from weft.hardware.collectives.algorithms import COLLECTIVES, CollectiveRun, GroupCosts
from weft.hardware.collectives.pattern import BusyLinks, Groups, GroupSet, LinkLoads, Traffic
from weft.hardware.routes import Floats, Network
from weft.hardware.topology.machine import LinkKind, Topology
from weft.ir.plan_nodes import CollectiveKind
from weft.units import Bytes, Seconds

# Sets of groups whose loads are kept; a step has some dozen.
_KEPT = 1024


def collective_seconds(
    topology: Topology, kind: CollectiveKind, size: Bytes, groups: Sequence[Sequence[int]]
) -> Seconds:
    """Seconds until the slowest of several groups has run a collective, where all run the same one at the same time.

    The cheapest of ring, tree and hierarchical algorithms counts, in the quickest protocol; all-to-alls go directly, or
    within nodes and then across them. A link's rate is shared by all groups that cross it.

    Args:
        topology: on whose devices it runs.
        kind: of collective.
        size: bytes of the largest side on one rank: of an all_reduce or reduce_scatter the input, of an all_gather the
            output, of an all_to_all the input.
        groups: numbers of devices; neither their order nor that within a group matters.

    Raises:
        UserError: when a group names a device twice, or one that the topology does not have.
    """
    run = _run(topology, kind, size, groups)
    return Seconds(0.0) if run is None else run.seconds


def transfer_seconds(topology: Topology, pieces: Pieces) -> Seconds:
    """Seconds until pieces (from, to, bytes) that are sent at the same time have all arrived.

    Raises:
        UserError: when a piece names a device that the topology does not have.
    """
    traffic = _traffic_of_pieces(topology, pieces)
    return Seconds(0.0) if traffic is None else traffic.seconds(1.0)


def _run(
    topology: Topology, kind: CollectiveKind, size: Bytes, groups: Sequence[Sequence[int]]
) -> CollectiveRun | None:
    if size <= 0:
        return None
    costs = _costs(topology).of(tuple(tuple(group) for group in groups if len(group) > 1))
    return None if costs is None else COLLECTIVES[kind](costs, size)


def _traffic_of_pieces(topology: Topology, pieces: Pieces) -> Traffic | None:
    for source, target, _ in pieces:
        _check_devices(topology, (source, target))
    return traffic_of_pieces(_costs(topology).network, pieces)


def _joined(parts: Sequence[BusyLinks]) -> BusyLinks:
    if len(parts) == 1:
        return parts[0]
    resources = np.concatenate([np.zeros(0, dtype=np.int64), *(one.resources for one in parts)])
    met, place = np.unique(resources, return_inverse=True)
    seconds = np.concatenate([np.zeros(0), *(one.seconds for one in parts)])
    total = np.bincount(place.reshape(-1), weights=seconds, minlength=len(met))
    return BusyLinks(met, total.astype(np.float64))


@final
class _Costs:
    """A topology's network, and the groups that were asked for last."""

    def __init__(self, topology: Topology) -> None:
        self.network = Network(topology)
        self._topology = topology
        self._known: OrderedDict[Groups, GroupCosts] = OrderedDict()

    def of(self, groups: Groups) -> GroupCosts | None:
        if not groups:
            return None
        found = self._known.get(groups)
        if found is None:
            for group in groups:
                _check_devices(self._topology, group)
                twice = [device for device in group if group.count(device) > 1]
                if twice:
                    raise UserError(
                        f"a group of {len(group)} devices must name each once, got {twice[0]} twice"
                    )
            found = self._known[groups] = GroupCosts(GroupSet(self.network, groups))
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return found


def _costs(topology: Topology) -> _Costs:
    # Beside the topology's fields, as its cached properties are: gone when it is.
    found: _Costs | None = vars(topology).get("_costs")
    if found is None:
        found = vars(topology)["_costs"] = _Costs(topology)
    return found


def _check_devices(topology: Topology, devices: Sequence[int]) -> None:
    for device in devices:
        if not 0 <= device < len(topology):
            raise UserError(
                f"device {device} is not one of the topology {topology.name}, "
                f"which has devices 0 to {len(topology) - 1}"
            )


Pieces: TypeAlias = Sequence[tuple[int, int, Bytes]]


def traffic_of_pieces(network: Network, pieces: Pieces) -> Traffic | None:
    """The traffic of pieces, until the last has arrived; None where all stays on its device."""
    sent = [piece for piece in pieces if piece[0] != piece[1] and piece[2] > 0]
    if not sent:
        return None
    source, target = (np.array([piece[side] for piece in sent]) for side in (0, 1))
    size = np.array([piece[2] for piece in sent], dtype=float)
    far = network.unit[source] != network.unit[target]
    loads = LinkLoads(network)
    near = [piece for piece, is_far in zip(sent, far.tolist(), strict=True) if not is_far]
    waits, links = _inside(network, loads, near)
    if far.any():
        units = network.unit[source[far]], network.unit[target[far]]
        for ways, ends in ((network.out, source[far]), (network.into, target[far])):
            resources, place = ways.of(ends)
            loads.add(resources, size[far][place])
        for resources, over in network.uplinks(*units):
            loads.add(resources, size[far][over])
        met = np.concatenate(units)
        level = network.level_waits[network.meeting(*units)].max()
        waits = np.maximum(waits, network.port_waits[:, met].max(axis=1) + level)
        for group in np.unique(network.group[met]).tolist():
            links |= {port.link for port in network.routes[group].kind.ports}
    # Messages to more peers than are in flight at a time wait for one another.
    most = max(Counter(piece[0] for piece in sent).values())
    rounds = -(-most // min(link.in_flight for link in links))
    bases = tuple(
        max(link.protocol(name).base for link in links) + rounds * wait
        for name, wait in zip(network.protocols, waits.tolist(), strict=True)
    )
    return Traffic(bases, (0.0,) * len(bases), loads.per_byte(), 0.0, loads)


def _inside(network: Network, loads: LinkLoads, pieces: Pieces) -> tuple[Floats, set[LinkKind]]:
    """Load the links within nodes; seconds of the longest way in each protocol, and the kinds of links."""
    waits = np.zeros(len(network.protocols))
    links: set[LinkKind] = set()
    for source, target, size in pieces:
        unit = network.unit[source]
        routes = network.routes[network.group[unit]]
        way = routes.route(int(network.local[source]), int(network.local[target]))
        assert way is not None
        loads.add(network.base[unit] + np.array(way.resources), np.array(float(size)))
        waits = np.maximum(waits, network.waits(way))
        links.update(way.links)
    return waits, links


@final
@dataclass(frozen=True)
class CollectiveLinks:
    """The links of a collective of all groups at the same time; arguments as of `collective_seconds`."""

    topology: Topology = field(repr=False, hash=False)
    kind: CollectiveKind
    size: Bytes
    groups: Groups

    def busy(self) -> BusyLinks:
        """Numbers of resources, and seconds in which the collective needs each of them whole."""
        run = _run(self.topology, self.kind, self.size, self.groups)
        parts = () if run is None else run.parts
        return _joined([traffic.busy(some, rounds) for traffic, some, rounds in parts])


@final
@dataclass(frozen=True)
class TransferLinks:
    """The links of pieces (from, to, bytes) that are sent at the same time."""

    topology: Topology = field(repr=False, hash=False)
    pieces: tuple[tuple[int, int, Bytes], ...]

    def busy(self) -> BusyLinks:
        """Numbers of resources, and seconds in which the pieces need each of them whole."""
        traffic = _traffic_of_pieces(self.topology, self.pieces)
        return _joined([] if traffic is None else [traffic.busy(1.0)])
